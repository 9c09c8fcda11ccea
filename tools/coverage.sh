#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Which lines the tests reach: of C++ without torch, and of the Python package, its child processes included.
#
#   tools/coverage.sh [TEST…]   the tests of Python to run; all that are not slow without any
set -uo pipefail
cd "$(dirname "$0")/.."

# Two tests at a time share two cores: threads that wait for each other sleep, which takes half the processor's time of spinning.
export OMP_WAIT_POLICY=passive
status=0
pages=build/coverage
cmake --preset coverage -Wno-dev >/dev/null && cmake --build --preset coverage || exit 1
find build/coverage -name '*.gcda' -delete
ctest --test-dir build/coverage -LE 'slow|gpu|bench-smoke|tidy' --output-on-failure -j 2 || status=1
mkdir -p $pages/cpp
.venv/bin/gcovr --root . --filter src/ --filter include/ --filter cli/ --exclude '.*_test\.cpp' --gcov-ignore-parse-errors=all \
  --print-summary --html-details $pages/cpp/index.html $pages || status=1

export PYTHONPATH=$PWD/build/dev/python PLIMSOLL_PROGRAM=$PWD/build/dev/bin/plimsoll
.venv/bin/python -m pytest -q -m "not slow" -p no:cacheprovider --timeout 1200 -n 2 --dist loadfile \
  --cov --cov-report=term --cov-report=html:$pages/python "${@:-tests}" || status=1
exit $status

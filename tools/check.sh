#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs every test that is not labelled slow, on what `make dev` built: ctest, then pytest.
set -uo pipefail
cd "$(dirname "$0")/.."

# Two tests at a time share two cores: threads that wait for each other sleep, which takes half the processor's time of spinning.
export OMP_WAIT_POLICY=passive
status=0
PLIMSOLL_CGROUP_SKIPS=$(mktemp)  # A line for each test that could not have its cgroup.
export PLIMSOLL_CGROUP_SKIPS
ctest --test-dir build/dev -LE 'slow|gpu' --output-on-failure -j 2 || status=1

export PYTHONPATH=$PWD/build/dev/python${PYTHONPATH:+:$PYTHONPATH}
export PLIMSOLL_PROGRAM=$PWD/build/dev/bin/plimsoll
# A test that hangs says where, ten minutes later; by a thread, for some hang in a call of C.
pytest=(.venv/bin/python -m pytest -q -m "not slow" -p no:cacheprovider --timeout 600 --timeout-method thread)
# Those that hold a process to its limit have the machine to themselves.
"${pytest[@]}" tests/budget || status=1
"${pytest[@]}" -n 2 --dist loadfile --durations 40 tests --ignore tests/budget || status=1
.venv/bin/python -m tests.support.cgroup --skipped "$PLIMSOLL_CGROUP_SKIPS"
rm -f "$PLIMSOLL_CGROUP_SKIPS"
exit $status

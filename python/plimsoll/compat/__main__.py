# SPDX-License-Identifier: Apache-2.0
"""Converts the arguments of KD-GAT's `python -m pipeline.cli` to a file of options for can-kd, and prints it.

    python -m plimsoll.compat kd-gat [STAGE] [--config FILE.json] [--preset MODEL,SIZE] [--KEY VALUE]...

Keys that can-kd does not use are named on standard error. Exit status 2: a key or a value is wrong.

Example:
  python -m plimsoll.compat kd-gat --config config.json --lr 0.001 > can_kd.toml
  plimsoll train can-kd --config can_kd.toml --data DATA --out RUN --memory-limit 1GiB
"""
from __future__ import annotations

import sys

from . import from_kd_gat


def main(arguments: list[str]) -> int:
    """Converts the arguments and prints the options. Returns the exit status."""
    if arguments[:1] != ["kd-gat"] or {"--help", "-h"} & set(arguments):
        asked = {"--help", "-h"} & set(arguments)
        print(__doc__, end="", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        found = from_kd_gat(arguments=arguments[1:])
    except (OSError, ValueError) as error:
        print(f"plimsoll.compat: error: {error}", file=sys.stderr)
        return 2
    for note in found.notes:
        print(f"plimsoll.compat: {note}", file=sys.stderr)
    print(found.toml, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

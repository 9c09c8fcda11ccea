# SPDX-License-Identifier: Apache-2.0
"""`python -m plimsoll`: the program `plimsoll`.

Threads: the main one.   Memory: that of the command.
"""
import sys

from .cli._program import main

if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""`plimsoll recipes copy`: a recipe's own files, to be changed.

Threads: the calling one.   Memory: the files' text.
"""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import NotFoundError
from ..recipes._copies import copy_recipe


def run(arguments: Sequence[str]) -> int:
    """Copies a recipe, and prints the paths of its files. Returns the exit status. Wrong usage ends the process with status 2."""
    parser = argparse.ArgumentParser(
        prog="plimsoll recipes copy", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Copy the files of a recipe in Python into a folder, to be changed",
        epilog="Example:\n  plimsoll recipes copy cosir ./mine\n  plimsoll train ./mine/recipe.py --data data/ --out run/ --memory-limit 2GiB")
    parser.add_argument("name", metavar="NAME", help="Recipe, as `plimsoll recipes` lists it")
    parser.add_argument("folder", metavar="DIR", help="Folder to make: new or empty")
    given = parser.parse_args(arguments)
    try:
        print("\n".join(copy_recipe(given.name, given.folder)))
    except (NotFoundError, ValueError, OSError) as error:
        print(f"plimsoll: error: {error}", file=sys.stderr)
        return 1
    print(f"its recipe is called my-{given.name}: plimsoll train {os.path.join(given.folder, 'recipe.py')} --help", file=sys.stderr)
    return 0

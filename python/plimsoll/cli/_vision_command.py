# SPDX-License-Identifier: Apache-2.0
"""`plimsoll import vision`: the command line of import_vision().

Threads: the calling one.   Memory: that of import_vision().
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import _core
from ..data.importers._vision_import import import_vision
from ._import_command import add_files, add_ignored, add_parts, add_rest, parser_of, run_import


def run(arguments: Sequence[str]) -> int:
    """Imports images, and prints the result. Returns the exit status. Wrong usage ends the process with status 2."""
    return run_import(_parser(), import_vision, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("vision", "Image set of rows with text and images, which stay encoded",
                       "plimsoll import vision receipts.jsonl --out receipts.images --errors-max 10\n"
                       "  plimsoll import vision *.tar --out receipts.images --part 3/8\n"
                       "  plimsoll import vision *.tar --out receipts.images --join 8")
    add_files(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="FILE", help="Image set to make, or made before")
    add("--images", metavar="DIR", help="Folder of the paths of images [that of the file which names them]")
    add("--text-field", default="text", metavar="NAME", help="Column of the text of rows without messages [text]")
    add("--image-field", default="image", metavar="NAME", help="Column of their image [image]")
    add("--response-field", default="response", metavar="NAME", help="Column of what is to be answered [response]")
    add("--errors-max", type=int, default=0,
        help="Number of rows that may be left out for an error, such as an image that cannot be decoded [0]")
    add("--pixels-max", type=int, default=_core.image_pixels_max,
        help=f"Number of pixels above which an image is refused as a decompression bomb [{_core.image_pixels_max}]")
    add("--image-bytes-max", default="64MiB", metavar="SIZE", help="Longest file of an image, or member of an archive [64MiB]")
    add("--line-bytes-max", default="100MiB", metavar="SIZE", help="Longest line [100MiB]")
    add_ignored(parser)
    add_parts(parser)
    add_rest(parser)
    return parser

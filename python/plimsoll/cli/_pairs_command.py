# SPDX-License-Identifier: Apache-2.0
"""`plimsoll import pairs`: the command line of import_pairs().

Threads: the calling one.   Memory: that of import_pairs().
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..recipes.cosir._pairs_import import import_pairs, libraries
from ._import_command import add_rest, parser_of, run_import


def run(arguments: Sequence[str]) -> int:
    """Imports pairs, and prints the result. Returns the exit status. Wrong usage ends the process with status 2."""
    parser = _parser()
    parser.parse_args(arguments)
    try:
        libraries()  # Before the governor is made: they are part of what the process held.
    except ImportError as error:
        print(f"plimsoll: error: {error}", file=sys.stderr)
        return 1
    return run_import(parser, import_pairs, arguments, source="images")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("pairs", "Features of images and captions by a model of transformers, for the recipe cosir",
                       "plimsoll import vision captions.jsonl --text-field caption --out captions.images\n"
                       "  plimsoll import pairs --images captions.images --model models/clip-vit-base-patch32 --out pairs\n"
                       "  plimsoll train cosir --data pairs --out run --memory-limit 2GiB")
    add = parser.add_argument
    add("--images", required=True, metavar="FILE", help="Image set, as import vision makes one: each row an image and captions")
    add("--model", required=True, metavar="DIR",
        help="Folder of a model of images and texts (CLIP, SigLIP), with its tokenizer and image processor")
    add("--out", required=True, metavar="DIR", help="Folder of features to make, or made before")
    add("--batch-size", type=int, default=32, help="Number of images, or captions, that the model is given at once [32]")
    add("--dtype", choices=("float32", "float16"), default="float32", help="Type of the features [float32]")
    add("--errors-max", type=int, default=0,
        help="Number of rows that may be left out for an error, such as a row without a caption [0]")
    add("--threads", type=int, default=1, help="Number of threads that decode images [1]")
    add_rest(parser)
    return parser

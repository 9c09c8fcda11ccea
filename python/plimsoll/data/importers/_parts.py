# SPDX-License-Identifier: Apache-2.0
"""Parts of an import: the files of part k of n, and the path of its set (decision 0053).

Threads: pure functions.   Memory: the names of the files.
"""
from __future__ import annotations

import argparse
import bisect
import itertools
import re
from collections.abc import Sequence
from typing import Any

_POLYNOMIAL = 0x82F63B78  # The polynomial of CRC-32C; the highest bit is that of x^0.

Part = tuple[int, int]  # (k, n): part k of n, counted from 1.


def part_from(text: str) -> Part:
    """Parses a part given on the command line, such as "3/8". Errors: argparse.ArgumentTypeError."""
    if not re.fullmatch(r"\d{1,9}/\d{1,9}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, such as 3/8")
    k, n = map(int, text.split("/"))
    try:
        check_parts((k, n), 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return k, n


def check_parts(part: Part | None, join: int) -> None:
    """Checks the arguments `part` and `join` of an import. Errors: ValueError."""
    if part is not None and join:
        raise ValueError("part and join: one or the other")
    if part is not None and not 1 <= part[0] <= part[1]:
        raise ValueError(f"part {part[0]} of {part[1]}: parts are 1 to {max(part[1], 1)}")
    if join < 0:
        raise ValueError(f"join: {join} parts")


def part_path(out: str, part: Part) -> str:
    """Returns the path of a part's set."""
    return f"{out}.part-{part[0]}-of-{part[1]}"


def how_to_make(part: Part) -> str:
    """Returns the options that make a part, for an error message."""
    return f"--part {part[0]}/{part[1]}, or part={part}"


def share(sizes: Sequence[int], part: Part) -> slice:
    """Returns the slice of files that belong to a part: neighbours, with about the same number of bytes in every part."""
    ends = list(itertools.accumulate(sizes))

    def part_of(file: int) -> int:  # Decides by the file's middle byte; if all files are empty, by its number.
        if ends[-1] == 0:
            return file * part[1] // len(ends) + 1
        return min(part[1], (2 * ends[file] - sizes[file]) * part[1] // (2 * ends[-1]) + 1)

    files = range(len(ends))
    return slice(bisect.bisect_left(files, part[0], key=part_of), bisect.bisect_right(files, part[0], key=part_of))


def joined_sum(sums: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the sums (bytes, CRC-32C) of inputs into the sum of their concatenation. Source: zlib's crc32_combine()."""
    crc = 0
    for one in sums:
        crc = _product(_power(one["bytes"]), crc) ^ one["crc32c"]
    return {"name": sums[0]["name"], "bytes": sum(one["bytes"] for one in sums), "crc32c": crc}


def _product(one: int, other: int) -> int:
    """Multiplies two polynomials, modulo the polynomial of the CRC."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= other if one >> bit & 1 else 0
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


def _power(count: int) -> int:
    """Returns x^(8 count) modulo the polynomial: the factor by which `count` zero bytes multiply a CRC."""
    power, base = 1 << 31, 1 << 23
    while count:
        power = _product(power, base) if count & 1 else power
        base = _product(base, base)
        count >>= 1
    return power

# SPDX-License-Identifier: Apache-2.0
"""Seals text as src/run/sealed_file.h does: for tests that change a run's small files by hand."""
import pathlib
import re


def crc32c(data: bytes) -> int:
    """Source: RFC 3720, appendix B.4; bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def seal_toml(path: pathlib.Path, text: str) -> None:
    """Writes `text` with a right last line in place of the one that it has."""
    text = re.sub(r"# crc32c [0-9a-f]{8}\n\Z", "", text)
    path.write_text(f"{text}# crc32c {crc32c(text.encode()):08x}\n")

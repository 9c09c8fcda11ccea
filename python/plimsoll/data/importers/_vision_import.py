# SPDX-License-Identifier: Apache-2.0
"""import_vision(): makes an image set from messages with images, in bounded memory.

C++ reads lines, decodes every image once and writes the set (image_writer.cpp). _row_reader.py reads the rows.
Torch and Pillow are not imported.

Reading order: import_vision(), _set_import.py, _Import, _Reader, _row_reader.py, _vision_row.py.
Threads: one owner.   Memory: a row with its images, three times where they are base64; an image decoded.
"""
from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ... import _core
from ...core._arrays import byte_size
from ...errors import CorruptError
from ...memory._memory import Governor, with_governor
from .._image_set import ImageSet
from ._chat_import import shortened
from ._chat_source import ChatFiles, ChatRows, chat_source
from ._parts import Part, joined_sum
from ._row_files import Reading
from ._row_reader import BadRow, KeyCounts, Row, RowReader, row_line
from ._set_import import SetImport, digest
from ._tar_rows import Fields
from ._vision_row import bytes_of

_VERSION = 2  # Raised when the same inputs give another set.
_SAID = {key: text for key, _, text in _core.chat_oddities()}
_EXAMPLES = 3
_COMMIT_BYTES = 64 << 20

_Path = str | os.PathLike[str]


@with_governor
def import_vision(files: _Path | Sequence[_Path] | Iterable[dict[str, Any]], out: _Path, *, images: _Path | None = None,
                  text_field: str = "text", image_field: str = "image", response_field: str = "response",
                  errors_max: int = 0, pixels_max: int = _core.image_pixels_max, line_bytes_max: int | str = "100MiB",
                  image_bytes_max: int | str = "64MiB", ignore_keys: Collection[str] = (), part: Part | None = None,
                  join: int = 0, rebuild: bool = False, progress: Callable[[int, int], object] | None = None,
                  governor: Governor | None = None) -> dict[str, Any]:
    """Makes an image set in the file `out` from rows with text and images.

    files:      paths of files whose rows are JSON (lines, one array, or indented objects), CSV, TSV, Parquet or Arrow; a
                folder written by datasets.save_to_disk(); or WebDataset archives. Files are plain or packed by gzip, zstd,
                bzip2 or xz, in UTF-8, UTF-16 or UTF-32. The format is found from their first bytes, not their names.
                A row has messages (OpenAI) or conversations (ShareGPT, LLaVA), with parts of type image_url, image or
                text, or <image> in a text. An image that names no source is the next of the row's `images` or `image`.
                Or a row has columns: text (or several texts, in a list) or a question, image, and response, answer or
                caption; docs/guide/data.md lists them. A WebDataset sample is a row: images, a text (.txt, .caption,
                .cls), .json; members that are not used are counted by extension in "about".
                Instead of files, any iterable of rows will do: a list, a Hugging Face Dataset.
                An image is a path, base64, a data: URI, bytes, {"bytes": …} or {"path": …}: JPEG, PNG or WebP.
    images:     folder that paths in rows refer to. None: the folder of the file the row is in.
    text_field, image_field, response_field: column names of rows without messages.
    errors_max: number of rows that may be left out, as their images cannot be decoded or their shape is unknown. One more
                ends the import, with file and line.
    pixels_max: most pixels of an image. A larger one is refused before it is decoded: it may be a decompression bomb.
    line_bytes_max: most bytes of a line. image_bytes_max: most bytes of an image's file, and of a member of an archive.
    ignore_keys: as for import_chat().
    part, join: as for import_chat(): part k of n of the files, and the set of n parts. An archive is not divided.
    rebuild:    makes the set even when neither inputs nor options have changed since `out` was made.
    progress:   called with (bytes done, bytes in all). For an iterable it counts rows (in all: 0 where it has no length),
                for join it counts parts.

    Images stay encoded. Each is decoded once as a check: the set has no damaged image, and none is replaced.
    If the import is killed at any moment, the same call resumes it, to the same bytes: inputs read before, including
    image files, are read again and compared. Each key of a row is used, refused with file and line, or counted under
    its name (about["keys"]). Returns plimsoll.info(out), "reused", and "first_rows": the first two rows as text, with
    the parts that are trained on between ⟦ and ⟧.
    Errors: ValueError naming file and line, or the option; NotFoundError; CorruptError (a damaged file, an
            array without an end); BudgetExceeded; OSError. The work done so far is kept for the next call.
    """
    assert governor is not None  # By with_governor.
    if errors_max < 0:
        raise ValueError("errors_max is not below 0")
    fields = Fields(text_field, image_field, response_field)
    rows = RowReader(ignore_keys, fields)
    options: dict[str, Any] = {"fields": [text_field, image_field, response_field], "ignore_keys": sorted(rows.ignored),
               "errors_max": errors_max, "pixels_max": pixels_max,
               "line_bytes_max": byte_size(line_bytes_max, "line_bytes_max"),
               "image_bytes_max": byte_size(image_bytes_max, "image_bytes_max")}
    source = chat_source(files, Reading(fields, row_line(rows.known), governor, options["image_bytes_max"],
                                        options["line_bytes_max"], images=True))
    job = _Import(source, os.fspath(out), options, rows, None if images is None else os.fspath(images), governor,
                  progress)
    path, reused = job.make(rebuild, part, join)
    return {**json.loads(_core.describe(path)), "reused": reused, "first_rows": _first_rows(path)}


class _Reader:
    """Reads the lines of a source, counts what was odd about them, and sums the image files that rows named."""

    def __init__(self, lines: _core.Lines, errors_max: int, row: Callable[[_Reader, int, int, bytes | None], Any]) -> None:
        """Takes the lines. row: called to read a row and the image files it names. Errors: BadRow."""
        self._lines = lines
        self._row = row
        self._errors_max = errors_max
        self._odd: dict[str, dict[str, Any]] = {}
        self._errors = 0
        self._counts = [0, 0]  # Numbers of lines and rows.
        self.keys = KeyCounts()
        self._images = [0, 0]  # Bytes, CRC.

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> tuple[int, int, bytes | None]:
        """Returns (file, line, the line's bytes); the bytes are None for a line that is too long."""
        line = self._lines.next()
        if line is None:
            raise StopIteration
        self._counts[0] += 1
        return line

    def took(self, image: bytes) -> None:
        """Adds an image file that a row named to the sum."""
        self._images = [self._images[0] + len(image), _core.crc32c(_bytes_array(image), self._images[1])]

    def note(self, key: str, file: int, line: int, text: str, *, error: bool = True) -> None:
        """Counts an oddity of a row. Errors: ValueError naming file and line, past errors_max."""
        odd = self._odd.setdefault(key, {"count": 0, "first": []})
        odd["count"] += 1
        if len(odd["first"]) < _EXAMPLES:
            odd["first"].append(self._lines.name_of(file, line, True))
        self._errors += error
        if error and self._errors > self._errors_max:
            before = f" ({self._errors - 1} rows before it were left out)" if self._errors > 1 else ""
            raise ValueError(f"{self._lines.name_of(file, line, False)}: {text}{before}: correct the row, or have more "
                             "rows left out with errors_max (--errors-max)") from None

    def count_row(self, row: Row) -> None:
        self._counts[1] += 1
        self.keys.add(row.used, 0, ((name, 1, count) for name, count in row.counted.items()))

    @property
    def state(self) -> str:
        """The reader's state for go_on(), as JSON: the next row's place, the sums, and the counts."""
        return json.dumps({"place": self._lines.place, "sums": self._lines.sums, "images": self._images,
                           "counts": self._counts, "errors": self._errors, "odd": self._odd,
                           "keys": self.keys.said()}, ensure_ascii=False)

    def go_on(self, state: str) -> bool:
        """Resumes from a state. Returns False where the inputs are no longer those that the state was made from."""
        was = json.loads(state)
        place, sums = tuple(was["place"]), [tuple(one) for one in was["sums"]]
        if was["images"][0]:  # Files that rows name are read again, too: they may have changed, or the folder may be another.
            self.skip_rest(was["counts"][0])
            if (self._lines.place, self._lines.sums, self._images) != (place, sums, was["images"]):
                return False
        elif not self._lines.go_to(place, sums):
            return False
        self._images, self._counts, self._errors, self._odd = was["images"], was["counts"], was["errors"], was["odd"]
        self.keys = KeyCounts(was["keys"])
        return True

    def skip_rest(self, lines: int | None = None) -> None:
        """Reads the rest, or `lines` lines of it, and the files that rows name, without using them: for their sums."""
        for one in itertools.islice(self, lines):
            with contextlib.suppress(BadRow):
                self._row(self, *one)

    @property
    def report(self) -> str:
        """The counts, as JSON."""
        return json.dumps({"lines": self._counts[0], "rows": self._counts[1], "odd": self._odd, "keys": self.keys.said()},
                          ensure_ascii=False)

    @property
    def sums(self) -> list[tuple[int, int]]:
        return self._lines.sums

    @property
    def image_sum(self) -> dict[str, Any]:
        return {"name": "image files", "bytes": self._images[0], "crc32c": self._images[1]}

    @property
    def done(self) -> int:
        return self._lines.done

    def close(self) -> None:
        self._lines.close()


class _Import(SetImport):
    wanted = "an image"
    harmless = ("no_image", *(key for key, error, _ in _core.chat_oddities() if not error))

    def __init__(self, source: ChatFiles | ChatRows, out: str, options: dict[str, Any], rows: RowReader,
                 images: str | None, governor: Governor, progress: Callable[[int, int], object] | None) -> None:
        super().__init__(source, out, digest([_VERSION, options, source.identity()]), governor, progress)
        self._options = options
        self._rows = rows
        self._images = images

    def open_writer(self, fingerprint: str, rebuild: bool) -> _core.ImageWriter:
        return _core.ImageWriter.open(self.governor._core, self.out, fingerprint, self._options["pixels_max"], rebuild)

    def open_set(self) -> _core.ImageSet:
        return _core.ImageSet.open(self.out)

    def about(self) -> dict[str, Any]:
        return {"options": self._options}

    def count(self, writer: _core.ImageWriter) -> int:
        return writer.images

    def open_reader(self) -> _Reader:
        names, feed = self.source.lines()
        self._folders = [folder if self._images is None else self._images for folder in self.source.folders()]
        lines = _core.Lines.open(self.governor._core, names, self._options["line_bytes_max"], feed)
        return _Reader(lines, self._options["errors_max"], self._row)

    def inputs(self, reader: _Reader) -> list[dict[str, Any]]:
        """Returns the inputs of the rows, and one entry for all image files that rows name."""
        return [*super().inputs(reader), reader.image_sum]

    def joined_inputs(self, inputs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        return [*super().joined_inputs([part[:-1] for part in inputs]), joined_sum([part[-1] for part in inputs])]

    def work(self, reader: _Reader, writer: _core.ImageWriter, position: dict[str, Any]) -> None:
        since = 0
        for file, line, text in reader:
            keys = 0
            try:
                found = self._row(reader, file, line, text)
                if found is None:
                    reader.note("blank_lines", file, line, "blank", error=False)
                    continue
                row, messages, images = found
                keys = row.keys
                since += len(messages) + sum(map(len, images))
                writer.append(messages, images)
            except BadRow as bad:
                reader.keys.add(0, keys or bad.keys, ())
                reader.note(bad.key, file, line, _said(bad), error=bad.key not in self.harmless)
                continue
            except (CorruptError, ValueError) as bad:
                reader.keys.add(0, keys, ())
                reader.note("bad_image", file, line, str(bad))
                continue
            reader.count_row(row)
            for key, there in (("no_image", not images), ("nulls", row.nulls)):
                if there:
                    reader.note(key, file, line, key, error=False)
            if since >= _COMMIT_BYTES:
                writer.commit(json.dumps({"reader": reader.state}))
                since = 0
            if self.progress is not None:
                self.progress(reader.done, self.source.total)
        self.finish(reader, writer, self.about())

    def _row(self, reader: _Reader, file: int, line: int, text: bytes | None) -> tuple[Row, str, list[bytes]] | None:
        """Returns (row, its messages as JSON, its images); None for a blank line. Errors: BadRow."""
        if text is None:
            raise BadRow("line_too_long", "longer than line_bytes_max (--line-bytes-max)")
        if not text.strip():
            return None
        row = self._rows.read(text)
        try:
            said = row.stored()
            try:
                said.encode()
            except UnicodeEncodeError as error:
                raise BadRow("not_utf8", f"a text with half a character, \\u{ord(said[error.start]):x}") from None
            images = []
            for one in row.images:
                image, is_file = bytes_of(one, self._folders[file], self._options["image_bytes_max"])
                if is_file:
                    reader.took(image)
                images.append(image)
        except BadRow as bad:
            bad.keys = row.keys
            raise
        return row, said, images


def _said(bad: BadRow) -> str:
    """Describes the fault of a row in words."""
    text = _SAID.get(bad.key)
    return bad.detail if text is None or (bad.detail and bad.key in _PARTICULAR) else f"{text}: {bad.detail}" if bad.detail else text


_PARTICULAR = ("bad_message", "no_shape", "line_too_long", "not_utf8")


def _first_rows(path: str) -> list[str]:
    """Returns the first two rows of a set as text, shortened; see shown()."""
    with ImageSet(path) as made:
        return [shown(made.row(row).messages) for row in range(min(2, len(made)))]


def shown(messages: list[dict[str, Any]]) -> str:
    """Returns messages as text, with the answers that are trained on between ⟦ and ⟧."""
    lines = []
    for one in messages:
        text = "".join("[image]" if part["type"] == "image" else shortened(part["text"]) for part in one.get("content", []))
        more = {key: value for key, value in one.items() if key not in ("role", "content", "train")}
        text += shortened(f" {json.dumps(more, ensure_ascii=False)}") if more else ""
        lines.append(f"{one['role']}: " + (f"⟦{text}⟧" if one["role"] == "assistant" and one.get("train", True) else text))
    return shortened("\n".join(lines), 4000)


def _bytes_array(data: bytes) -> Any:
    import numpy as np

    return np.frombuffer(data, np.uint8)

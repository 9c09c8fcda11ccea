# SPDX-License-Identifier: Apache-2.0
"""ImageSet: rows of messages and encoded images from one file; decode_image(), resize_image().

Threads: an ImageSet may be read from any number of threads.
"""
from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from .. import _core
from ..core._arrays import byte_size, not_pickled
from ..memory._memory import Governor
from ._row_set import RowSet

Place = tuple[int, int]
FILTERS = ("box", "bilinear", "hamming", "bicubic", "lanczos")  # ImageFilter.


def decode_image(encoded: bytes | bytearray | memoryview, *, pixels_max: int = _core.image_pixels_max) -> np.ndarray:
    """Decodes a JPEG, PNG or WebP image, upright, to the same bits as Pillow. Shape: uint8 [height, width, 3].

    The bits are those of ImageOps.exif_transpose(Image.open(file)).convert("RGB"): alpha is left out, CMYK is converted
    without a profile, 16 bits become 8, and an animation gives its first frame.

    pixels_max: an image with more pixels is refused before it is decoded.
    Errors:  ValueError (no such format, too many pixels); CorruptError (damaged, truncated).
    Threads: any; Python's lock is released meanwhile.
    """
    data = np.frombuffer(encoded, np.uint8)
    _, width, height, _, _ = _core.image_info(data, pixels_max)
    pixels = np.empty((height, width, 3), np.uint8)
    _core.decode_image(data, pixels_max, pixels.reshape(-1))
    return pixels


def resize_image(pixels: np.ndarray, width: int, height: int, *, filter: str = "bicubic") -> np.ndarray:
    """Resizes as Image.resize() of Pillow 13 does, to the same bits. Shape: uint8 [h, w, 3] to [height, width, 3].

    filter:  "box", "bilinear", "hamming", "bicubic" or "lanczos".
    Errors:  ValueError (another shape or filter, a side of 0 or above 2^24).
    Threads: any; Python's lock is released meanwhile.
    """
    if filter not in FILTERS:
        raise ValueError(f"filter: {filter!r} is none of {', '.join(FILTERS)}")
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ValueError(f"pixels: {pixels.dtype} {pixels.shape} is not uint8 [height, width, 3]")
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width} x {height} pixels")
    out = np.empty((height, width, 3), np.uint8)
    _core.resize_image(np.ascontiguousarray(pixels).reshape(-1), (pixels.shape[1], pixels.shape[0]), out.reshape(-1),
                       (width, height), FILTERS.index(filter))
    return out


@dataclasses.dataclass(frozen=True)
class ImageRow:
    """A row of an ImageSet."""

    messages: list[dict[str, Any]]  # In the form of transformers' chat templates: parts of type "text" and "image".
    sizes: list[tuple[int, int]]  # (width, height) of the upright images, in the order of the "image" parts.


class ImageSet(RowSet[ImageRow]):
    """Rows of messages and images in one file (docs/formats/image_set.md). Images stay encoded: JPEG, PNG or WebP.

        images = plimsoll.ImageSet("receipts.images")
        images[0].messages
        pixels = images.image(0)
        for batch in images.batches(batch_size=2, governor=governor, seed=7, threads=2):
            inputs = processor([row.images for row in batch])

    Nothing is kept in memory: reading the same rows again takes no more memory than reading them once.

    Errors: NotFoundError, CorruptError, OSError.
    Memory: a descriptor, and a row while it is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(os.fspath(path), _core.ImageSet.open(os.fspath(path)))
        (self.images, self.encoded_bytes, self.decoded_bytes, self.work_bytes_max,
         self.fingerprint) = self._core.counts

    def row(self, row: int) -> ImageRow:
        """Returns a row without the bytes of its images. Errors: IndexError; CorruptError naming the row; OSError."""
        messages, places = self._core.row(self._number(row))
        return ImageRow(json.loads(messages), [place[3:] for place in places])

    def encoded(self, row: int, image: int = 0) -> np.ndarray:
        """Returns an image of a row, still encoded. Shape: uint8 [bytes]. Errors: IndexError; CorruptError; OSError."""
        places = self._core.row(self._number(row))[1]
        if not 0 <= image < len(places):
            raise IndexError(f"image {image} of {len(places)} of row {row}")
        out = np.empty(places[image][1], np.uint8)
        self._core.read(places[image], out)
        return out

    def image(self, row: int, image: int = 0) -> np.ndarray:
        """Decodes an image of a row with decode_image(). Shape: uint8 [height, width, 3].

        Errors: IndexError; CorruptError; OSError.
        """
        return decode_image(self.encoded(row, image).data, pixels_max=1 << 62)

    def batches(self, batch_size: int = 1, *, governor: Governor, shuffle: bool = True, seed: int = 0,
                held_out: int = 0, only_held_out: bool = False, threads: int = 1, queue_bytes: int | str = "256MiB",
                place: Place = (0, 0)) -> ImageBatches:
        """Returns batches of rows with decoded images, for training; epochs follow one another without end.

        held_out:    number of rows to leave out, chosen by chance and the same for any seed.
        only_held_out: reads only these rows instead of all others.
        threads:     number of threads that decode ahead of use.
        queue_bytes: bytes of pixels to decode ahead; at least one batch is.
        place:       where to begin: an earlier ImageBatches.place.
        Errors:      ValueError naming the option; BudgetExceeded.
        """
        batches = ImageBatches(_core.ImageBatches.open(governor._core, self._core, batch_size, shuffle, seed, held_out,
                                                       only_held_out, threads, byte_size(queue_bytes, "queue_bytes"),
                                                       place))
        governor._adopt(batches)
        return batches


class ImageBatchRow:
    """A row of a batch. images: its pixels, uint8 [height, width, 3], which you may keep and change."""

    __slots__ = ("row", "messages", "images")

    def __init__(self, row: int, messages: list[dict[str, Any]], images: list[np.ndarray]) -> None:
        """Takes what ImageBatches.next() read."""
        self.row = row
        self.messages = messages
        self.images = images


class ImageBatch:
    """Rows of an ImageSet with decoded images. Their memory is leased until the last array is freed."""

    __slots__ = ("rows", "place", "ends_epoch")

    def __init__(self, rows: list[ImageBatchRow], place: Place, ends_epoch: bool) -> None:
        """Takes what ImageBatches.next() read."""
        self.rows = rows
        self.place = place
        self.ends_epoch = ends_epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ImageBatchRow]:
        return iter(self.rows)


class ImageBatches:
    """Batches of an ImageSet in a seeded order, decoded ahead of use by threads; made by ImageSet.batches().

    The images of a batch are freed with it. Memory does not grow with the number of images in the set.

    Memory: queue_bytes of pixels, or one batch; and for each thread the decoder's own memory beside the pixels.
    """

    def __init__(self, core: _core.ImageBatches) -> None:
        """Takes what ImageSet.batches() made; call that instead."""
        self._core = core

    __reduce_ex__ = not_pickled

    def next(self) -> ImageBatch:
        """Returns the next batch. Errors: CorruptError naming the row; OSError; BudgetExceeded; the place is then unchanged."""
        place, rows, ends_epoch = self._core.next()
        return ImageBatch([ImageBatchRow(row, json.loads(messages), images) for row, messages, images in rows], place,
                          ends_epoch)

    def __iter__(self) -> Iterator[ImageBatch]:
        """Yields the remaining batches of the current epoch."""
        while True:
            batch = self.next()
            ends_epoch = batch.ends_epoch
            yield batch
            del batch  # Frees it while the next one is decoded.
            if ends_epoch:
                return

    @property
    def place(self) -> Place:
        """The position for seek(): (epoch, number of rows before the next batch)."""
        return self._core.place

    def seek(self, place: Place) -> None:
        """Moves to an earlier `place` of batches with the same options. Errors: ValueError."""
        self._core.seek(cast(Place, tuple(place)))

    def close(self) -> None:
        """Ends the threads and closes the set. Batches that you hold stay valid."""
        self._core.close()

# SPDX-License-Identifier: Apache-2.0
"""image_processor(): makes a transformers image processor faster, with the same output bits.

Plimsoll resizes and scales the pixels. The rest is the processor's own code: smart_resize, splitting, patches.

Threads: those of the original processor.   Memory: that of the original, without its copies in float64.
"""
from __future__ import annotations

import copy
import dataclasses
import functools
import random
import warnings
from typing import Any, TypeVar, cast

import numpy as np

from .. import _core
from ._image_set import resize_image

_Processor = TypeVar("_Processor")
_PILLOW = {4: "box", 2: "bilinear", 5: "hamming", 3: "bicubic", 1: "lanczos"}  # By the number that Pillow has for it.
_PROBES = ((1, 1), (3, 200), (64, 48), (337, 91), (500, 333), (224, 224))


def image_processor(processor: _Processor) -> _Processor:
    """Returns a copy of a transformers image processor that gives the same arrays, sooner and in less memory.

        processor = AutoProcessor.from_pretrained(folder)
        processor.image_processor = plimsoll.image_processor(processor.image_processor)

    The copy takes Pillow images, and arrays as ImageSet.image() returns them: uint8 [height, width, 3], always in this
    order, where the original guesses the order from the sizes. Any processor of the Pillow backend is tried: CLIP, SigLIP,
    Qwen2-VL, Idefics3, SmolVLM and others. The copy is compared with the original on generated images. If they
    differ, the function warns and returns the original.

    Errors: ValueError for anything but an image processor of the Pillow backend.
    """
    from transformers.image_processing_backends import PilBackend

    if not isinstance(processor, PilBackend):
        raise ValueError(f"processor: {type(processor).__name__} is no image processor of the Pillow backend; load it "
                         "with AutoImageProcessor.from_pretrained(…, backend='pil')")
    made, kind = copy.copy(processor), cast(Any, type(processor))
    made.__class__ = _made_of(kind)
    if _differ(processor, made):
        warnings.warn(f"{type(processor).__name__} does what Plimsoll does not; it is left as it is", stacklevel=2)
        return processor
    return made


def _differ(processor: Any, made: Any) -> bool:
    from PIL import Image

    numbers = np.random.default_rng(random.Random("probes").randrange(1 << 30))
    for height, width in _PROBES:
        pixels = numbers.integers(0, 256, (height, width, 3), np.uint8)
        try:
            wanted = processor(Image.fromarray(pixels), return_tensors="np")
        except ValueError:  # Qwen2-VL refuses narrow images.
            continue
        got = made(pixels, return_tensors="np")
        if wanted.keys() != got.keys() or not all(np.array_equal(wanted[key], got[key]) for key in wanted):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class _Scaled:
    """A normalisation mean that carries the rescale factor with it, so that normalize() applies both."""

    mean: Any
    factor: float


@functools.cache
def _made_of(kind: type) -> type:
    class Made(kind, _exact()):  # type: ignore[misc]
        def _preprocess(self, images: Any, **options: Any) -> Any:
            if options.get("do_rescale") and options.get("do_normalize"):
                mean = _Scaled(options["image_mean"], options["rescale_factor"])
                options |= {"do_rescale": False, "image_mean": mean}
            return super()._preprocess(images, **options)

    Made.__name__, Made.__qualname__, Made.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Made


@functools.cache
def _exact() -> type:
    from transformers.image_processing_backends import PilBackend
    from transformers.image_transforms import (get_resize_output_image_size, get_size_with_aspect_ratio, normalize,
                                               rescale)
    from transformers.image_utils import ChannelDimension, get_image_size_for_max_height_width

    @functools.lru_cache(maxsize=16)
    def table(factor: float, mean: Any, std: Any) -> np.ndarray:
        """Returns the original's output for each of the 256 pixel values, by channel. Shape: float32 [3, 256]."""
        values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        first = ChannelDimension.FIRST
        scaled = rescale(values, factor, data_format=first, input_data_format=first)
        return np.ascontiguousarray(normalize(scaled, mean, std, first, first)[:, 0])

    class Exact(PilBackend):  # Behind the processor's own class, before the backend, in the order of methods.
        def process_image(self, image: Any, *arguments: Any, **options: Any) -> np.ndarray:
            if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3:
                return np.moveaxis(image, -1, 0)
            return super().process_image(image, *arguments, **options)

        def resize(self, image: np.ndarray, size: Any, resample: Any = None, reducing_gap: Any = None,
                   **options: Any) -> np.ndarray:
            filter = _PILLOW.get(2 if resample is None else resample) if reducing_gap is None else None
            if filter is None or image.dtype != np.uint8 or image.shape[0] != 3:
                return super().resize(image, size, resample, reducing_gap, **options)
            height, width = image.shape[1:]
            if size.shortest_edge and size.longest_edge:
                to = get_size_with_aspect_ratio((height, width), size.shortest_edge, size.longest_edge)
            elif size.shortest_edge:
                to = get_resize_output_image_size(image, size.shortest_edge, default_to_square=False,
                                                  input_data_format=ChannelDimension.FIRST)
            elif size.max_height and size.max_width:
                to = get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
            else:
                to = (size.height, size.width)
            return np.moveaxis(resize_image(np.moveaxis(image, 0, -1), int(to[1]), int(to[0]), filter=filter), -1, 0)

        def normalize(self, image: np.ndarray, mean: Any, std: Any, **options: Any) -> np.ndarray:  # type: ignore[override]
            if not isinstance(mean, _Scaled):
                return super().normalize(image, mean, std, **options)
            if image.dtype != np.uint8 or image.shape[0] != 3:
                return super().normalize(super().rescale(image, mean.factor), mean.mean, std, **options)
            out = np.empty(image.shape, np.float32)
            pixels = np.ascontiguousarray(np.moveaxis(image, 0, -1))
            _core.scale_image(pixels.reshape(-1), table(mean.factor, mean.mean, std).reshape(-1), out.reshape(-1))
            return out

    return Exact

# SPDX-License-Identifier: Apache-2.0
"""bytes_of(): reads the encoded bytes of an image that a row names.

Threads: pure functions.   Memory: the image, twice where it is base64.
"""
from __future__ import annotations

import base64
import binascii
import os
from typing import Any

from ._row_reader import BadRow

_BASE64_OF_IMAGES = ("/9j/", "iVBORw0KGgo", "UklGR")  # Beginnings of JPEG, PNG and WebP in base64.
_PATH_MOST = 4096


def bytes_of(image: Any, folder: str, bytes_max: int) -> tuple[bytes, bool]:
    """Returns (an image's encoded bytes, whether they come from a file). bytes_max: most bytes of a file. Errors: BadRow."""
    if isinstance(image, dict):
        if image.get("damage") is not None:
            raise BadRow("bad_image", f"a picture that Pillow cannot save: {image['damage']}")
        if image.get("bytes") is not None:
            return _unpacked(image["bytes"]), False
        image = image.get("path")
    if not isinstance(image, str) or not image:
        raise BadRow("bad_message", f"an image that is {type(image).__name__}; a path, base64 or a data: URI is known")
    if image.startswith("data:"):
        head, _, encoded = image.partition(",")
        if not head.endswith(";base64"):
            raise BadRow("bad_message", "a data: URI that is not base64")
        return _unpacked(encoded), False
    if image.startswith(("http://", "https://")):
        raise BadRow("remote_image", f"an image on the network ({image[:80]}): download it first")
    if len(image) >= _PATH_MOST or (image.startswith(_BASE64_OF_IMAGES) and "." not in image):
        return _unpacked(image), False
    path = os.path.join(folder, image.removeprefix("file://"))
    try:
        with open(path, "rb") as file:
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise BadRow("missing_image", f"{path}: {what}; images= (--images) names the folder of images") from None
    if len(data) > bytes_max:
        raise BadRow("image_too_long", f"{path}: longer than image_bytes_max (--image-bytes-max)")
    return data, True


def _unpacked(text: Any) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (AttributeError, ValueError, binascii.Error) as error:
        raise BadRow("bad_base64", f"an image that is not base64: {error}") from None

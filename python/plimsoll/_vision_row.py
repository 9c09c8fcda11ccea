# SPDX-License-Identifier: Apache-2.0
"""What a row of messages and images says, whichever of the shapes it has.

Out come messages as chat templates of transformers take them, parts of type "text" and "image", and the images in the
order of these parts.

Threads: pure functions.   Memory: the row, and its images once more where they are base64.
"""
from __future__ import annotations

import base64
import binascii
import io
import json
import os
import struct
from collections.abc import Callable
from typing import Any

from ._tar_rows import Fields

_ROLES = ("system", "user", "assistant", "tool", "developer")
_BASE64_OF_IMAGES = ("/9j/", "iVBORw0KGgo", "UklGR")  # What JPEG, PNG and WebP begin with.
_PATH_MOST = 4096
_OF_PILLOW = (OSError, SyntaxError, ValueError, TypeError, AttributeError, struct.error)  # Of damaged pixels and EXIF.

Message = dict[str, Any]


class BadRow(Exception):
    """A row that is left out, or ends the import. key: what it is counted under."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(what)
        self.key = key


def parse_row(line: bytes, fields: Fields) -> tuple[list[Message], list[Any]]:
    """Messages, and the images they have, as they are named. Errors: BadRow."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise BadRow("not_utf8", "not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadRow("not_json", f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadRow("not_an_object", "not a JSON object")
    if row.get("messages"):
        return _messages(row, fields)
    text, response, image = row.get(fields.text), row.get(fields.response), row.get(fields.image)
    if image is None and response is None:
        raise BadRow("no_shape", f"neither messages nor {fields.image} or {fields.response}")
    texts = text if isinstance(text, list) else [] if text in (None, "") else [text]
    for name, values in ((fields.text, texts), (fields.response, [] if response is None else [response])):
        if not all(isinstance(value, str) for value in values):
            raise BadRow("bad_message", f"{name} is not text")
    images = image if isinstance(image, list) else [] if image is None else [image]
    asked = [{"type": "image"} for _ in images] + [{"type": "text", "text": one} for one in texts]
    messages = [{"role": "user", "content": asked}] if asked else []
    if response is not None:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": response}]})
    return messages, images


def _messages(row: dict[str, Any], fields: Fields) -> tuple[list[Message], list[Any]]:
    given = row.get("images", row.get(fields.image))
    columns = iter(given if isinstance(given, list) else [] if given is None else [given])
    messages: list[Message] = []
    images: list[Any] = []
    if not isinstance(row["messages"], list):
        raise BadRow("bad_message", "messages is not a list")
    for message in row["messages"]:
        if not isinstance(message, dict) or "content" not in message:
            raise BadRow("bad_message", "a message that is no object with a role and content")
        if message.get("role") not in _ROLES:
            raise BadRow("unknown_role", f"unknown role {str(message.get('role'))[:40]!r}")
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise BadRow("bad_message", "a message whose content is neither text nor parts")
        kept = []
        for part in parts:
            text, image = _part(part, columns)
            kept.append({"type": "image"} if text is None else {"type": "text", "text": text})
            images += [] if text is not None else [image]
        messages.append({"role": message["role"], "content": kept})
    if next(columns, None) is not None:
        raise BadRow("bad_message", "more images than parts of the messages name")
    return messages, images


def _part(part: Any, columns: Any) -> tuple[str | None, Any]:
    """The text of a part, or its image. Errors: BadRow."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return part["text"], None
    if kind not in ("image", "image_url", "input_image"):
        raise BadRow("bad_message", f"a part of type {str(kind)[:40]!r}; text, image and image_url are known")
    # Of datasets, where every part has every key, those that are null are not there.
    image = next((part[key] for key in ("image_url", "image", "url", "path", "base64") if part.get(key) is not None),
                 None)
    if isinstance(image, dict) and "url" in image:
        image = image["url"]
    if image is None:
        image = next(columns, None)
    if image is None:
        raise BadRow("bad_message", "fewer images than parts of the messages name")
    return None, image


def bytes_of(image: Any, folder: str, bytes_max: int) -> tuple[bytes, bool]:
    """An image's encoded bytes, and whether they are those of a file, of bytes_max at most. Errors: BadRow."""
    if isinstance(image, dict):
        if image.get("damage") is not None:
            raise BadRow("bad_image", f"a picture that Pillow cannot save: {image['damage']}")
        if image.get("bytes") is not None:
            return _unpacked(image["bytes"]), False
        image = image.get("path")
    if not isinstance(image, str) or not image:
        raise BadRow("bad_message", f"an image that is {type(image).__name__}; a path, base64 or a data: URI is known")
    if image.startswith("data:"):
        head, _, data = image.partition(",")
        if not head.endswith(";base64"):
            raise BadRow("bad_message", "a data: URI that is not base64")
        return _unpacked(data), False
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


def row_line(fields: Fields) -> Callable[[Any], Any]:
    """What JSON says of a row of an iterable: bytes and pictures as base64."""
    keys = ("messages", "images", fields.text, fields.image, fields.response)

    def line(row: Any) -> Any:
        if not isinstance(row, dict):
            return row
        return {key: _plain(row[key]) for key in dict.fromkeys(keys) if row.get(key) is not None}

    return line


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "save") and hasattr(value, "getdata"):  # A picture of Pillow's: lossless, and upright by EXIF.
        packed = io.BytesIO()
        try:  # It reads the file only now.
            kept = value if value.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else value.convert("RGB")
            kept.save(packed, "PNG", compress_level=1, exif=value.getexif())
        except _OF_PILLOW as error:
            return {"damage": str(error)}
        return {"bytes": base64.b64encode(packed.getvalue()).decode()}
    return value

# SPDX-License-Identifier: Apache-2.0
"""Seeded pictures of every kind that JPEG, PNG and WebP have, and what Pillow makes of them."""
import io
import random
import struct
import zlib

import numpy as np
from PIL import Image, ImageFile, ImageOps

ImageFile.LOAD_TRUNCATED_IMAGES = False


def pillow(encoded):
    """Shape: uint8 [height, width, 3]; as transformers loads an image."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB"))


def picture(numbers, width, height, channels=3):
    """Smooth colors, edges and noise. Shape: uint8 [height, width, channels]."""
    seed = np.random.default_rng(numbers.randrange(1 << 30))
    y, x = np.mgrid[:height, :width].astype(np.float32)
    out = np.empty((height, width, channels), np.float32)
    for c in range(channels):
        a, b, p = seed.uniform(0.005, 0.2, 3)
        out[..., c] = 128 + 90 * np.sin(a * x + 5 * p) * np.cos(b * y)
    out[height // 3:height // 2 + 1, width // 4:width // 2 + 1] = seed.uniform(0, 255, channels)
    out += seed.normal(0, seed.choice([0, 4, 40]), out.shape)
    return np.clip(out, 0, 255).astype(np.uint8)


def saved(image, kind, **options):
    packed = io.BytesIO()
    image.save(packed, kind, **options)
    return packed.getvalue()


def oriented(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def png(rows, depth, color, *chunks, interlaced=False):
    """A PNG of raw rows, filters among them; chunks are (name, body)."""
    width, height = rows["size"]

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, int(interlaced))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunk(*one) for one in chunks)
            + chunk(b"IDAT", zlib.compress(rows["data"], 1)) + chunk(b"IEND", b""))


_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # By a PNG's color type.
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def random_png(numbers, width, height):
    """Any color type and depth, interlaced or not, with palettes that may be short, and transparency."""
    color = numbers.choice(list(_DEPTHS))
    depth = numbers.choice(_DEPTHS[color])
    bits = depth * _SAMPLES[color]
    interlaced = numbers.random() < 0.3
    sizes = [(width, height)] if not interlaced else [
        ((width - x + step_x - 1) // step_x, (height - y + step_y - 1) // step_y) for x, y, step_x, step_y in _PASSES]
    data = bytearray()
    for across, down in sizes:
        if across > 0 and down > 0:
            for _ in range(down):
                data += bytes([numbers.randrange(5)]) + numbers.randbytes((across * bits + 7) // 8)
    chunks = []
    if color == 3:
        colors = numbers.choice([1 << depth, max(1, (1 << depth) // 2)])
        chunks.append((b"PLTE", numbers.randbytes(3 * colors)))
        if numbers.random() < 0.5:
            chunks.append((b"tRNS", numbers.randbytes(numbers.randrange(1, colors + 1))))
    elif color in (0, 2) and numbers.random() < 0.3:
        chunks.append((b"tRNS", b"\0\x01" * _SAMPLES[color]))
    if numbers.random() < 0.3:
        chunks.append((b"eXIf", oriented(numbers.randrange(1, 9)).tobytes().removeprefix(b"Exif\0\0")))
    return png({"size": (width, height), "data": bytes(data)}, depth, color, *chunks, interlaced=interlaced)


def random_jpeg(numbers, width, height):
    """Grey, color or CMYK; baseline or progressive; any subsampling, restarts, orientation."""
    mode = numbers.choice(["L", "RGB", "RGB", "RGB", "CMYK"])
    pixels = picture(numbers, width, height, {"L": 1, "RGB": 3, "CMYK": 4}[mode])
    image = Image.fromarray(pixels[..., 0] if mode == "L" else pixels, mode)
    options = {"quality": numbers.choice([5, 50, 75, 95, 100]), "progressive": numbers.random() < 0.4,
               "optimize": numbers.random() < 0.2}
    if mode == "RGB":
        options["subsampling"] = numbers.choice([0, 1, 2])
    if numbers.random() < 0.3:
        options["restart_marker_blocks"] = numbers.randrange(1, 9)
    if numbers.random() < 0.4:
        options["exif"] = oriented(numbers.randrange(1, 9))
    return saved(image, "JPEG", **options)


def random_webp(numbers, width, height):
    """Lossy or lossless, with alpha or not, moving or not."""
    mode = numbers.choice(["RGB", "RGBA"])
    frames = [Image.fromarray(picture(numbers, width, height, len(mode)), mode)
              for _ in range(numbers.choice([1, 1, 1, 3]))]
    options = {"lossless": numbers.random() < 0.4, "quality": numbers.choice([10, 80]), "method": 0}
    if len(frames) > 1:
        options |= {"save_all": True, "append_images": frames[1:], "duration": 40}
    if numbers.random() < 0.4:
        options["exif"] = oriented(numbers.randrange(1, 9))
    return saved(frames[0], "WEBP", **options)


KINDS = {"png": random_png, "jpeg": random_jpeg, "webp": random_webp}


def random_picture(kind, number):
    """The number-th of its kind: sides of 1 to 90, some of them of 1 x N."""
    numbers = random.Random(f"{kind} {number}")
    width, height = (numbers.choice([1, 2, 3, 8, 9, 17, 33, 64, 90]) for _ in range(2))
    return KINDS[kind](numbers, width, height)

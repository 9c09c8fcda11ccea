# SPDX-License-Identifier: Apache-2.0
"""decode_image and resize_image: the pixels are Pillow's, bit for bit; what is damaged or too large is an error."""
import io
import pathlib
import random

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
Image = pytest.importorskip("PIL.Image")

from tests.support import pictures

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
FILTERS = {"box": Image.Resampling.BOX, "bilinear": Image.Resampling.BILINEAR, "hamming": Image.Resampling.HAMMING,
           "bicubic": Image.Resampling.BICUBIC, "lanczos": Image.Resampling.LANCZOS}


def real_images():
    files = sorted([*DATA.glob("conceptual_captions_mini/images/*"), *DATA.glob("coco_mini/*/*.jpg")])
    if not files:
        pytest.skip("needs ../shared/data")
    return files


def compare(encoded, name):
    assert np.array_equal(plimsoll.decode_image(encoded), pictures.pillow(encoded)), name


def test_all_real_images_are_those_of_pillow():
    for file in real_images():
        compare(file.read_bytes(), file.name)


@pytest.mark.parametrize("kind", list(pictures.KINDS))
def test_generated_images_are_those_of_pillow(kind):
    for number in range(250):
        compare(pictures.random_picture(kind, number), f"{kind} {number}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(pictures.KINDS))
def test_two_thousand_generated_images_are_those_of_pillow(kind):
    for number in range(250, 2250):
        compare(pictures.random_picture(kind, number), f"{kind} {number}")


def test_a_huge_image_is_that_of_pillow():
    numbers = random.Random(5)
    pixels = pictures.picture(numbers, 3000, 2400)
    for kind, options in (("JPEG", {"progressive": True}), ("JPEG", {}), ("WEBP", {"method": 0}), ("PNG", {})):
        compare(pictures.saved(Image.fromarray(pixels), kind, **options), kind)


def test_orientation_is_read_wherever_it_may_be():
    image = Image.fromarray(pictures.picture(random.Random(2), 20, 9))
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    profile = pictures.oriented(8).tobytes().hex()
    text = f"\nexif\n{len(profile) // 2:8}\n{profile}\n".encode()
    import zlib

    rows = {"size": (2, 3), "data": b"".join(b"\0" + bytes(range(6 * y, 6 * y + 6)) for y in range(3))}
    given = {
        "jpeg": pictures.saved(image, "JPEG", exif=pictures.oriented(6)),
        "jpeg xmp": pictures.saved(image, "JPEG", xmp=xmp),
        "webp xmp": pictures.saved(image, "WEBP", xmp=xmp),
        "png itxt": pictures.png(rows, 8, 2, (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp)),
        "png packed itxt": pictures.png(rows, 8, 2, (b"iTXt", b"XML:com.adobe.xmp\0\x01\0\0\0" + zlib.compress(xmp))),
        "png profile": pictures.png(rows, 8, 2, (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))),
        "png profile, plain": pictures.png(rows, 8, 2, (b"tEXt", b"Raw profile type exif\0" + text)),
    }
    for name, encoded in given.items():
        wide = Image.open(io.BytesIO(encoded)).size
        turned = plimsoll.decode_image(encoded)
        assert turned.shape[:2] == (wide[0], wide[1]), name
        compare(encoded, name)


@pytest.mark.parametrize("kind", list(pictures.KINDS))
def test_a_truncated_or_damaged_image_is_an_error_or_that_of_pillow(kind):
    """M10: never a blank, never a grey rest."""
    numbers = random.Random(kind)
    refused = 0
    for number in range(60):
        whole = pictures.random_picture(kind, number)
        with pytest.raises((plimsoll.CorruptError, ValueError)):
            plimsoll.decode_image(whole[:numbers.randrange(len(whole) - 1)])
        damaged = bytearray(whole)
        for _ in range(numbers.randrange(1, 4)):
            damaged[numbers.randrange(len(damaged))] = numbers.randrange(256)
        damaged = bytes(damaged)
        try:
            ours = plimsoll.decode_image(damaged)
        except (plimsoll.CorruptError, ValueError):
            refused += 1
            continue
        try:
            theirs = pictures.pillow(damaged)
        except Exception:
            continue  # Damage beside the pixels, of which Pillow reads more.
        assert np.array_equal(ours, theirs), (kind, number)
    assert refused > 5


def test_a_decompression_bomb_is_refused_by_name_and_option():
    """M10: before anything is decoded."""
    rows = {"size": (60_000, 60_000), "data": b""}
    for encoded in (pictures.png(rows, 8, 2),):
        with pytest.raises(ValueError, match=r"PNG of 60000 x 60000 pixels, more than 89478485 \(pixels_max\).*"
                                             r"--pixels-max"):
            plimsoll.decode_image(encoded)
    small = pictures.random_picture("jpeg", 1)
    with pytest.raises(ValueError, match="pixels_max"):
        plimsoll.decode_image(small, pixels_max=1)
    compare(small, "with the default")


@pytest.mark.parametrize("name", list(FILTERS))
def test_resizing_is_that_of_pillow(name):
    numbers = random.Random(name)
    for number in range(60):
        width, height = (numbers.choice([1, 2, 7, 31, 64, 123]) for _ in range(2))
        to = tuple(numbers.choice([1, 3, 14, 28, 63, 224]) for _ in range(2))
        pixels = pictures.picture(numbers, width, height)
        wanted = np.asarray(Image.fromarray(pixels).resize(to, FILTERS[name]))
        assert np.array_equal(plimsoll.resize_image(pixels, *to, filter=name), wanted), (number, width, height, to)


def test_resizing_real_images_is_that_of_pillow():
    for file in real_images()[::17]:
        pixels = plimsoll.decode_image(file.read_bytes())
        for name, to in (("bicubic", (224, 224)), ("lanczos", (1456, 1092)), ("bilinear", (99, 640))):
            wanted = np.asarray(Image.fromarray(pixels).resize(to, FILTERS[name]))
            assert np.array_equal(plimsoll.resize_image(pixels, *to, filter=name), wanted), (file.name, name)


def test_what_cannot_be_resized_is_named():
    pixels = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(ValueError, match="filter: 'nearest' is none of box"):
        plimsoll.resize_image(pixels, 2, 2, filter="nearest")
    with pytest.raises(ValueError, match="is not uint8"):
        plimsoll.resize_image(pixels.astype(float), 2, 2)
    with pytest.raises(ValueError, match="0 x 2 pixels"):
        plimsoll.resize_image(pixels, 0, 2)

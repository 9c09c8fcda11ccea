# SPDX-License-Identifier: Apache-2.0
"""image_processor: what CLIP, SigLIP, Qwen2-VL, Idefics3 and SmolVLM are given is, bit for bit, what transformers gives."""
import pathlib
import random

import numpy as np
import pytest

plimsoll = pytest.importorskip("plimsoll")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from tests.support import pictures

DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"


def processors():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return {"clip": CLIPImageProcessorPil(), "siglip": SiglipImageProcessorPil(),
            "qwen2_vl": Qwen2VLImageProcessorPil(max_pixels=28 * 28 * 160),
            "idefics3": Idefics3ImageProcessorPil(return_row_col_info=True),
            "smolvlm": SmolVLMImageProcessorPil(size={"longest_edge": 1024}, max_image_size={"longest_edge": 512}),
            "clip, unscaled": CLIPImageProcessorPil(do_rescale=False, do_normalize=False),
            "clip, scaled only": CLIPImageProcessorPil(do_normalize=False)}


NAMES = ("clip", "siglip", "qwen2_vl", "idefics3", "smolvlm", "clip, unscaled", "clip, scaled only")


def compare(theirs, ours, pixels, name, originals=None):
    """originals: what the original is given, where that is not made of `pixels`."""
    try:
        wanted = theirs(originals or [Image.fromarray(one) for one in pixels], return_tensors="np")
    except ValueError:
        with pytest.raises(ValueError):
            ours(pixels, return_tensors="np")
        return
    got = ours(pixels, return_tensors="np")
    assert wanted.keys() == got.keys()
    for key in wanted:
        assert np.array_equal(wanted[key], got[key]), (name, key)
        assert np.asarray(wanted[key]).dtype == np.asarray(got[key]).dtype


@pytest.mark.parametrize("name", NAMES)
def test_arrays_are_those_of_the_original(name):
    theirs = processors()[name]
    ours = plimsoll.image_processor(theirs)
    assert type(ours) is not type(theirs), "it was left as it is"
    numbers = random.Random(name)
    for number in range(12):
        sizes = [(numbers.choice([1, 4, 60, 200, 401]), numbers.choice([1, 3, 90, 224, 500]))] * numbers.choice([1, 2])
        compare(theirs, ours, [pictures.picture(numbers, *size) for size in sizes], (name, number, sizes))


def compare_encoded(name, images):
    """From the file on: Pillow's decoder and the original, against ours. images: names and encoded bytes.

    Of Qwen2-VL, Idefics3 and SmolVLM the arrays say, too, at which positions tokens of the image stand: the grid, rows
    and columns of pieces.
    """
    theirs = processors()[name]
    ours = plimsoll.image_processor(theirs)
    for number, encoded in images:
        compare(theirs, ours, [plimsoll.decode_image(encoded)], (name, number),
                [Image.fromarray(pictures.pillow(encoded))])


def real_images():
    files = sorted([*DATA.glob("conceptual_captions_mini/images/*"), *DATA.glob("coco_mini/*/*.jpg")])
    if not files:
        pytest.skip("needs ../shared/data")
    return [(file.name, file) for file in files]


def generated(numbers):
    """Every mode and depth, EXIF, CMYK, progressive, palettes, alpha, 1 x N; every 500th is huge."""
    for number in numbers:
        kind = list(pictures.KINDS)[number % 3]
        if number % 500 == 499:
            yield number, pictures.saved(Image.fromarray(pictures.picture(random.Random(number), 3000, 2400)), "JPEG",
                                         progressive=number % 1000 == 499)
        else:
            yield number, pictures.random_picture(kind, number)


@pytest.mark.parametrize("name", NAMES[:5])
def test_arrays_of_real_images_are_those_of_the_original(name):
    compare_encoded(name, ((one, file.read_bytes()) for one, file in real_images()[::43]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:5])
def test_arrays_of_all_real_images_are_those_of_the_original(name):
    compare_encoded(name, ((one, file.read_bytes()) for one, file in real_images()))


@pytest.mark.parametrize("name", NAMES[:5])
def test_arrays_of_generated_images_are_those_of_the_original(name):
    compare_encoded(name, generated(range(490, 520)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:5])
def test_arrays_of_two_thousand_generated_images_are_those_of_the_original(name):
    compare_encoded(name, generated(range(2000)))


def test_options_of_a_call_are_heeded():
    theirs = processors()["clip"]
    ours = plimsoll.image_processor(theirs)
    pixels = pictures.picture(random.Random(1), 80, 50)
    for options in ({"image_mean": [0.1, 0.2, 0.3]}, {"rescale_factor": 1.0}, {"do_rescale": False},
                    {"size": {"height": 30, "width": 31}, "do_center_crop": False}, {"resample": 0}):
        wanted = theirs(Image.fromarray(pixels), return_tensors="np", **options)["pixel_values"]
        assert np.array_equal(ours(pixels, return_tensors="np", **options)["pixel_values"], wanted), options


def test_a_processor_that_does_something_else_is_left_as_it_is():
    class Other(type(processors()["clip"])):
        def normalize(self, image, mean, std, **options):
            return super().normalize(image.astype(np.float32) + 1, mean, std, **options)

    other = Other()
    with pytest.warns(UserWarning, match="Other does what Plimsoll does not"):
        assert plimsoll.image_processor(other) is other
    with pytest.raises(ValueError, match="is no image processor of the Pillow backend"):
        plimsoll.image_processor(object())

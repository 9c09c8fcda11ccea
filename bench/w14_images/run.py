#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""JPEG to model input: decoding beside raw TurboJPEG, the whole way beside the model's own processor, both on one core; and images
a second into a training step, beside a DataLoader around datasets, WebDataset and SPDL."""
import argparse
import ctypes.util
import functools
import hashlib
import importlib.util
import io
import os
import pathlib
import random
import re
import statistics
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.chat_bench import add_options, one_side, run

BAR_DECODE, BAR_WHOLE, BAR_GROWTH_MIB = 0.95, 2.0, 8
ROUNDS, EPOCHS, BATCH = 5, 3, 16
MODELS = ("clip", "siglip", "qwen2_vl")
FEEDS = ("plimsoll", "datasets_0", "datasets_2", "webdataset_0", "webdataset_2", "spdl")
NEEDS = {"datasets": "datasets", "webdataset": "webdataset", "spdl": "spdl"}


def fail(why: str) -> None:
    sys.exit(f"w14_images: {why}")


# ---- What every side is given: JPEG files ----

def write_images(options, work: pathlib.Path) -> list[pathlib.Path]:
    """Of --images, those that are JPEG and upright; smoke: generated ones."""
    from PIL import Image

    folder = work / "images"
    folder.mkdir()
    if options.smoke:
        from tests.support import pictures

        dice = random.Random(7)
        made = [pictures.saved(Image.fromarray(pictures.picture(dice, 300 + 7 * k, 400 - 5 * k)), "JPEG", quality=80)
                for k in range(12)]
    else:
        files = sorted(file for file in pathlib.Path(options.images).rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
        made = [file.read_bytes() for file in files]
        made = [one for one in made if (image := Image.open(io.BytesIO(one))).format == "JPEG" and image.mode == "RGB"
                and image.getexif().get(0x0112, 1) == 1]
    if not made:
        fail(f"no JPEG file in {options.images}: name a folder of photographs with --images")
    for k, one in enumerate(made):
        (folder / f"{k:06}.jpg").write_bytes(one)
    return sorted(folder.iterdir())


def processor_of(name: str):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    return {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil, "qwen2_vl": Qwen2VLImageProcessorPil}[name]()


def upright(encoded: bytes):
    """As transformers loads an image."""
    from PIL import Image, ImageOps

    return ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")


# ---- One core ----

def rates(ways: dict, encoded: list[bytes], rounds: int) -> dict[str, float]:
    """Images a second of the processor's time, the median of rounds in which the ways take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in sorted(ways, reverse=number % 2 == 1):
            began = time.process_time()
            for one in encoded:
                ways[name](one)
            if number:  # The first warms up.
                seconds[name].append(time.process_time() - began)
    return {name: len(encoded) / statistics.median(found) for name, found in seconds.items()}


def decoding(options) -> dict:
    import plimsoll

    encoded = [file.read_bytes() for file in sorted(pathlib.Path(options.folder).iterdir())]
    ways = {"plimsoll": plimsoll.decode_image, "pillow": lambda one: np.asarray(upright(one))}
    if importlib.util.find_spec("simplejpeg"):
        import simplejpeg

        ways["simplejpeg"] = functools.partial(simplejpeg.decode_jpeg, colorspace="RGB")
    if importlib.util.find_spec("turbojpeg") and ctypes.util.find_library("turbojpeg"):
        import turbojpeg

        library = turbojpeg.TurboJPEG()
        ways["PyTurboJPEG"] = functools.partial(library.decode, pixel_format=turbojpeg.TJPF_RGB)
    for one in encoded:
        wanted = ways["plimsoll"](one)
        for name, way in ways.items():
            if not np.array_equal(way(one), wanted):
                fail(f"{name} has other pixels")
    return {"images_per_second": rates(ways, encoded, options.rounds), "images": len(encoded)}


def whole(options) -> dict:
    """From bytes to arrays, by the model's own processor and by ours."""
    import plimsoll

    encoded = [file.read_bytes() for file in sorted(pathlib.Path(options.folder).iterdir())]
    found = {}
    for name in MODELS:
        theirs = processor_of(name)
        ours = plimsoll.image_processor(theirs)
        if type(ours) is type(theirs):
            fail(f"{name}: the processor was left as it is")
        ways = {"plimsoll": lambda one, made=ours: made(plimsoll.decode_image(one), return_tensors="np"),
                "processor": lambda one, made=theirs: made(upright(one), return_tensors="np")}
        for one in encoded:
            got, wanted = (ways[way](one) for way in ("plimsoll", "processor"))
            if got.keys() != wanted.keys() or not all(np.array_equal(got[key], wanted[key]) for key in wanted):
                fail(f"{name}: other arrays than the processor's")
        found[name] = rates(ways, encoded, options.rounds)
    return {"images_per_second": found}


# ---- Into a training step ----

def resident() -> int:
    """Of anonymous memory, this process's and its children's."""
    pids, total = [os.getpid()], 0
    while pids:
        pid = pids.pop()
        try:
            total += int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) << 10
            pids += map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (FileNotFoundError, TypeError):
            continue
    return total


def trained(options, batches, ahead=lambda: 0) -> dict:
    """Epochs of steps of a small model. batches(epoch): pairs of ids and pixels, float32 [images, 3, 224, 224].

    ahead(): bytes of the next epoch that are decoded, which differ by the images that they are of; not part of `after`.
    """
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 32, 32), torch.nn.GELU(), torch.nn.Flatten(), torch.nn.Linear(32 * 49, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    speed, sums, after = 0.0, [], []
    for epoch in range(EPOCHS):
        seen: dict[int, bytes] = {}
        began = time.perf_counter()
        for ids, pixels in batches(epoch):
            loss = model(pixels).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if epoch == 0:  # The answer; this epoch, which warms up, is not timed.
                seen |= {int(id): hashlib.sha256(one.numpy().tobytes()).digest() for id, one in zip(ids, pixels)}
        if epoch == 0:
            sums = [len(seen), hashlib.sha256(b"".join(seen[id] for id in sorted(seen))).hexdigest()]
        speed = sums[0] / (time.perf_counter() - began)
        if epoch in (0, EPOCHS - 1):  # Before the last, which counts, no queue is waited for.
            decoded = ahead()
            after.append(resident() - decoded)
    return {"images_per_second": speed, "answer": sums, "after": after}


def feed(options) -> dict:
    """Of the way that options.way names."""
    name, _, workers = options.way.partition("_")
    files = sorted(pathlib.Path(options.folder).iterdir())
    return {"plimsoll": by_plimsoll, "datasets": by_datasets, "webdataset": by_webdataset, "spdl": by_spdl}[name](
        options, files, int(workers or 0))


def by_plimsoll(options, files, _) -> dict:
    import torch

    import plimsoll

    made = plimsoll.image_processor(processor_of("clip"))
    images = plimsoll.ImageSet(options.set)
    governor = plimsoll.Governor("2GiB")
    batches = images.batches(BATCH, governor=governor, seed=1, threads=2, queue_bytes="64MiB")

    def epoch(_):
        for batch in batches:
            yield [row.row for row in batch], torch.from_numpy(
                np.stack(made([row.images[0] for row in batch], return_tensors="np")["pixel_values"]))

    def ahead():
        before, now = -1, 0
        while now != before:  # Until the queue is full.
            time.sleep(0.5)
            before, now = now, governor.ledger().leased_bytes
        return now

    return trained(options, epoch, ahead)


def by_datasets(options, files, workers) -> dict:
    import datasets
    import torch

    made = processor_of("clip")
    rows = datasets.Dataset.from_dict({"image": [str(file) for file in files], "id": list(range(len(files)))}).cast_column(
        "image", datasets.Image())

    def transform(batch):
        pixels = made([one.convert("RGB") for one in batch["image"]], return_tensors="pt")["pixel_values"]
        return {"id": batch["id"], "pixels": list(pixels)}

    loader = torch.utils.data.DataLoader(
        rows.with_transform(transform), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0,
        collate_fn=lambda some: ([one["id"] for one in some], torch.stack([one["pixels"] for one in some])))
    return trained(options, lambda _: loader)


def by_webdataset(options, files, workers) -> dict:
    import torch
    import webdataset

    made = processor_of("clip")
    folder = pathlib.Path(options.directory)
    shards = max(1, workers)
    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard:02}.tar")) as out:
            for k in range(shard, len(files), shards):
                out.write({"__key__": f"{k:06}", "jpg": files[k].read_bytes()})

    def one(sample):
        return int(sample["__key__"]), made(sample["jpg"], return_tensors="pt")["pixel_values"][0]

    rows = webdataset.WebDataset(str(folder / f"{{00..{shards - 1:02}}}.tar"), shardshuffle=shards, seed=1).shuffle(100).decode(
        "pilrgb").map(one).batched(BATCH, collation_fn=lambda some: ([one[0] for one in some], torch.stack([one[1] for one in some])))
    loader = webdataset.WebLoader(rows, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return trained(options, lambda _: loader)


def by_spdl(options, files, _) -> dict:
    """Two threads of its pipeline decode by Pillow (its own FFmpeg has other pixels) and make what the model is given."""
    import torch
    from spdl.pipeline import PipelineBuilder

    made = processor_of("clip")

    def one(number):
        return number, made(upright(files[number].read_bytes()), return_tensors="pt")["pixel_values"][0]

    def epoch(number):
        order = random.Random(number).sample(range(len(files)), len(files))
        pipeline = PipelineBuilder().add_source(order).pipe(one, concurrency=2).aggregate(BATCH).add_sink(3).build(num_threads=2)
        with pipeline.auto_stop():
            for some in pipeline:
                yield [id for id, _ in some], torch.stack([pixels for _, pixels in some])

    return trained(options, epoch)


SIDES = {"decoding": decoding, "whole": whole, "feed": feed}


# ---- The comparison ----

def compare(options, work: pathlib.Path) -> dict:
    import plimsoll

    files = write_images(options, work)
    with plimsoll.Governor("1GiB") as governor:
        plimsoll.import_vision([{"image": {"path": str(file)}, "text": ""} for file in files], work / "set", governor=governor)
    missing = [name for name in ("simplejpeg", *NEEDS) if importlib.util.find_spec(name) is None]
    words = ["--folder", work / "images", "--set", work / "set", "--rounds", options.rounds]
    decoded = one_side("decoding", words, work, threads=1)
    if missing and not options.smoke:
        print(f"w14_images: without {', '.join(missing)}, which are not installed", file=sys.stderr)
    ways = one_side("whole", words, work, threads=1)["images_per_second"]
    feeds = {way: one_side("feed", [*words, "--way", way], work, threads=1) for way in FEEDS
             if NEEDS.get(way.split("_")[0]) not in missing}
    for way, said in feeds.items():
        if said["answer"] != feeds["plimsoll"]["answer"] or said["answer"][0] != len(files):
            fail(f"{way} has other pixels or images: {said['answer']}")
    raw = {name: rate for name, rate in decoded["images_per_second"].items() if name not in ("plimsoll", "pillow")}
    x_decode = decoded["images_per_second"]["plimsoll"] / max(raw.values()) if raw else 0.0
    x_whole = {name: one["plimsoll"] / one["processor"] for name, one in ways.items()}
    growth = (feeds["plimsoll"]["after"][-1] - feeds["plimsoll"]["after"][0]) / 2**20
    others = {way: said["images_per_second"] for way, said in feeds.items() if way != "plimsoll"}
    passed = x_decode >= BAR_DECODE and min(x_whole.values()) >= BAR_WHOLE and growth <= BAR_GROWTH_MIB
    return {"name": "w14_images", "value": round(min(x_whole.values()), 3), "unit": "x the model's own processor", "bar": BAR_WHOLE,
            "bar_decode": BAR_DECODE, "bar_growth_mib": BAR_GROWTH_MIB, "pass": options.smoke or passed, "peers": {
                "x_raw_turbojpeg": round(x_decode, 3), "x_processor": {name: round(one, 3) for name, one in x_whole.items()},
                "growth_mib": round(growth, 1),
                "decoded_per_second": {name: round(one, 1) for name, one in decoded["images_per_second"].items()},
                "whole_per_second": {name: {way: round(one, 1) for way, one in two.items()} for name, two in ways.items()},
                "fed_per_second": {way: round(said["images_per_second"], 1) for way, said in feeds.items()},
                "x_best_feed": round(feeds["plimsoll"]["images_per_second"] / max(others.values()), 3) if others else 0.0,
                "images": len(files), "rounds": options.rounds, "batch": BATCH, "without": missing}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", default=str(ROOT.parent / "shared" / "data"), help="folder of photographs [../shared/data]")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"times that each image is taken by each way [{ROUNDS}]")
    add_options(parser)
    for hidden in ("--folder", "--set", "--way"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        options.rounds = 1
    return run(options, lambda: SIDES[options.side](options), lambda work: compare(options, work))


if __name__ == "__main__":
    sys.exit(main())

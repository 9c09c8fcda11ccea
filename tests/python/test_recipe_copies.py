# SPDX-License-Identifier: Apache-2.0
"""`plimsoll recipes copy`: copies of cosir and can-kd use public names alone, and train to the bits of the originals."""
import ast
import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from plimsoll.cli._program import main
from tests.support.on_device import skip_without_torch

skip_without_torch()

GIVEN = {"memory_limit": "4GiB", "foreign_bytes": "512MiB", "compute_threads": 1, "progress": False}
COSIR = {**GIVEN, "epochs": 1, "batch_size": 200, "seed": 11, "eval_pairs": 60, "oracle_angles": 3, "phase2_epochs": 1}


def trained(support, code, data, pairs):
    """What plimsoll.train() returns for each of (recipe, folder), in one process of its own."""
    program = (f"import json, sys\nimport plimsoll\nfrom tests.support import {support}\ndata = {support}.{code}\n"
               f"for recipe, out in json.loads(sys.argv[1]):\n    print(json.dumps(plimsoll.train(recipe, data=data, out=out, **json.loads(sys.argv[2]))))\n")
    done = subprocess.run([sys.executable, "-c", program, json.dumps(pairs, default=str), json.dumps(data)], text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-len(pairs):]]


def copied(name, folder):
    assert main(["recipes", "copy", name, str(folder)]) == 0
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                assert not re.search(r"^plimsoll\b.*\._", f"{node.module}."), (file, node.module)  # By public names.
                assert not (node.module or "").startswith("plimsoll") or all(not one.name.startswith("_") for one in node.names)
            assert not isinstance(node, ast.ImportFrom) or node.level < 2
    return folder / "recipe.py"


def test_a_copy_of_cosir_trains_to_the_same_digest(tmp_path):
    file = copied("cosir", tmp_path / "mine")
    assert "--label-dim 128" in file.read_text() and "train cosir" not in file.read_text()
    ours, copys = trained("cosir_python", f"make_pairs({str(tmp_path / 'data')!r}, groups=120) and {str(tmp_path / 'data')!r}", COSIR,
                          [("cosir", tmp_path / "ours"), (file, tmp_path / "copy")])
    assert copys["state_sha256"] == ours["state_sha256"] and copys["recall"] == ours["recall"] and copys["step"] > 2
    assert 'recipe = "my-cosir"' in (tmp_path / "copy" / "run.toml").read_text()


def test_a_copy_of_can_kd_trains_to_the_same_models(tmp_path):
    file = copied("can-kd", tmp_path / "mine")
    (tmp_path / "bus").mkdir()
    from tests.support.python_can_kd import SMALL

    given = {**SMALL, "max_epochs": 1, "stage": "autoencoder"}
    ours, copys = trained("python_can_kd", f"make_set(__import__('pathlib').Path({str(tmp_path / 'bus')!r})).as_posix()", given,
                          [("can-kd", tmp_path / "ours"), (file, tmp_path / "copy")])
    assert copys["models"].keys() == ours["models"].keys() and copys["step"] == ours["step"] > 2
    for model in sorted((tmp_path / "ours" / "models").iterdir()):
        assert (tmp_path / "copy" / "models" / model.name).read_bytes() == model.read_bytes(), model.name


def test_what_is_no_recipe_and_where_something_is_are_refused(tmp_path, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.py").touch()
    for name, folder, told in (("tuning", "new", "'tuning' is no recipe of Plimsoll's"), ("../cosir", "new", "no recipe"),
                               ("nobody", "new", "no recipe"), ("cosir", "full", "there is something already")):
        assert main(["recipes", "copy", name, str(tmp_path / folder)]) == 1
        assert told in capfd.readouterr().err
    assert not (tmp_path / "new").exists() and len(list((tmp_path / "full").iterdir())) == 1
    assert main(["recipes", "copy", "chat", str(tmp_path / "chat")]) == 0
    assert '"my-chat"' in (tmp_path / "chat" / "recipe.py").read_text()

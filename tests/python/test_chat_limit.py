# SPDX-License-Identifier: Apache-2.0
"""The recipe `chat` at its limit: plans are what steps take, and a run stays inside a cgroup whose killer is armed."""
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from test_chat import QUICK, digest, events  # Skips where a library is not there.

import plimsoll
from plimsoll.core import _torch_gate
from plimsoll.recipes import chat
from plimsoll.recipes.tuning._choice import choose
from plimsoll.recipes.tuning._model import made_within
from tests.support import chats
from tests.support.cgroup import MemoryCgroup
from tests.support.chat_models import KINDS, make_model, make_tokens, make_wide_model
from tests.support.quick_collections import collections_are_quick, collections_are_whole_again  # noqa: F401  Fixtures.

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20


# ---- Plans ----

@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Whatever libraries load late is there, and no part of what a limit leaves."""
    folder = tmp_path_factory.mktemp("loaded")
    make_tokens(folder / "set", make_model(folder / "model"))
    plimsoll.train("chat", out=folder / "run", data=folder / "set", model=folder / "model", **QUICK)


def drawn(number):
    """(kind of model, its sizes, options of the recipe, MiB for tensors) of a case."""
    dice = random.Random(f"plan {number}")
    kind = sorted(KINDS)[number % len(KINDS)]
    sizes = {"layers": dice.choice([2, 3, 5]), "width": dice.choice([32, 48, 64]), "dtype": dice.choice(["float32", "bfloat16"])}
    options = {"sequence_length": dice.choice([33, 64, 100, 256, 480]), "packing": dice.random() < 0.6,
               "dtype": dice.choice(["float32", "bfloat16"]), "accumulate": dice.choice([1, 1, 4]),
               "clip_norm": dice.choice([0.0, 1.0])}
    options |= dice.choice([
        {"method": "full", "gradient_checkpointing": "on"}, {"method": "full", "gradient_checkpointing": "off"},
        {"weights": "resident", "gradient_checkpointing": "off"}, {"weights": "resident", "gradient_checkpointing": "on"},
        {"weights": "resident", "gradient_checkpointing": "off", "dora": True}, {"weights": "streamed"}, {"weights": "streamed"}])
    if options.get("method") != "full":
        options |= {"lora_r": dice.choice([2, 8]), "lora_dropout": dice.choice([0.0, 0.1])}
    return kind, sizes, options, dice.choice([16, 24, 40])


SHORT = (11, 19)  # Seconds; the first streams.
FOREIGN = 128 * MIB  # The heap of one process that makes, imports and plans thirty models.


def planned(limit, **options):
    """A plan under a limit, or under one that its refusal names."""
    for _ in range(4):
        try:
            return plimsoll.plan("chat", **{**options, "memory_limit": limit, "foreign_bytes": FOREIGN})
        except plimsoll.BudgetExceeded as error:
            named = re.search(r"limit of (?:at least )?([\d.]+) ?MiB", str(error).split("free of the")[-1].split("needs at once:")[-1])
            limit = int(float(named[1]) + 1) * MIB if named else limit + 32 * MIB
    raise AssertionError(f"no plan in {limit / MIB:.0f} MiB")


def measured(monkeypatch, **options):
    """The highest sum of tensors in a step of a real run on full sequences, and in the one that it admits."""
    peaks, step, arena = [], plimsoll.Run.step, _torch_gate.load()

    def watched(self, *args, **more):
        arena.reset_peak()
        made = step(self, *args, **more)
        peaks.append(arena.arena_stats()["live_peak_bytes"])
        return made

    monkeypatch.setattr(plimsoll.Run, "step", watched)
    plimsoll.train("chat", **options)
    return max(peaks)


@pytest.mark.parametrize("number", [pytest.param(number, marks=[] if number in SHORT else pytest.mark.slow) for number in range(30)])
def test_a_plan_is_what_a_real_run_takes(number, loaded, tmp_path, monkeypatch):
    """To the byte where it is called exact, and never below: 30 cases of models, lengths and methods."""
    kind, sizes, options, mib = drawn(number)
    make_model(tmp_path / "model", kind, **sizes)
    rows = [{"messages": chats.chat(random.Random(k), system=False, turns=1, most=900)} for k in range(60)]
    chats.write_lines(tmp_path / "rows.jsonl", rows)
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_chat(tmp_path / "rows.jsonl", tmp_path / "set", tokenizer=tmp_path / "model", train="all", governor=governor)
    with plimsoll.Governor("4GiB") as governor:  # What is held now.
        limit = governor.ledger().baseline_bytes + FOREIGN + mib * MIB
    given = {**QUICK, **options, "model": tmp_path / "model", "data": tmp_path / "set"}
    plan = planned(limit, **{name: value for name, value in given.items() if name not in ("progress", "memory_limit")})
    given["epochs"] = given.get("accumulate", 1)  # So that there is an update.
    peak = measured(monkeypatch, **given, out=tmp_path / "run", batch_size=plan["batch_size"], held_out=0)
    print(f"{number}: {kind} {sizes} {options} {mib} MiB: {plan['label']} {plan['batch_size']} rows, {plan['peak_bytes']:,} planned, "
          f"{plan['measured_bytes']:,} rehearsed, {peak:,} in the run")
    assert plan["label"] in ("exact", "bounded") and peak <= plan["peak_bytes"] and plan["measured_bytes"] <= plan["peak_bytes"]
    assert plan["label"] != "exact" or plan["peak_bytes"] == plan["measured_bytes"]


def test_a_model_that_does_not_fit_is_refused_with_a_limit_to_try_until_it_fits(loaded, tmp_path):
    """The governor, the model while it is made, and its step: each refusal says a limit under which it goes further."""
    make_model(tmp_path / "model", "llama", layers=5, width=64, dtype="float32")
    make_tokens(tmp_path / "set", tmp_path / "model")
    given = {**QUICK, "model": tmp_path / "model", "data": tmp_path / "set", "foreign_bytes": FOREIGN, "weights": "resident",
             "gradient_checkpointing": "off"}
    given = {name: value for name, value in given.items() if name not in ("progress", "memory_limit")}
    with plimsoll.Governor("4GiB") as governor:
        limit = governor.ledger().baseline_bytes + FOREIGN
    refusals, plan = [], None
    while plan is None and len(refusals) < 8:
        try:
            plan = plimsoll.plan("chat", **given, memory_limit=limit)
        except plimsoll.BudgetExceeded as error:
            refusals.append(error)
            assert error.smallest_limit_bytes > limit and "limit of " in str(error), error
            limit = error.smallest_limit_bytes
    assert plan is not None and plan["batch_size"] >= 1, refusals
    assert "tensors" in {error.tag for error in refusals}, refusals


def test_a_model_that_does_not_fit_a_rank_is_refused_with_a_limit_of_all_ranks(loaded, tmp_path):
    make_model(tmp_path / "model", "llama", layers=3, width=512, dtype="float32")
    options = chat.Options(data="", model=str(tmp_path / "model"), weights="resident", sequence_length=64)
    with plimsoll.Governor("4GiB") as governor:
        choice, share = choose(options, 1 << 30), governor.ledger().baseline_bytes + FOREIGN + 16 * MIB
    with plimsoll.Governor(share, foreign_bytes=FOREIGN) as governor, pytest.raises(plimsoll.BudgetExceeded) as refused:
        made_within(governor, options, choice, whole=lambda limit: 2 * limit + 7 * MIB)
    limit = refused.value.smallest_limit_bytes
    assert limit > 2 * share + 7 * MIB and f"try a limit of {limit // MIB} MiB" in str(refused.value)


# ---- A cgroup ----

LIVES = """
import json, os, sys
import plimsoll
given = eval(sys.argv[1])
summary = plimsoll.resume(given["out"], progress=False) if os.path.exists(given["out"]) else plimsoll.train("chat", **given)
print(json.dumps({name: summary[name] for name in ("status", "step", "weights", "held_out_loss")}))
"""


@pytest.mark.parametrize("width, layers, limit, kills", [
    (512, 24, 592, 1), pytest.param(1024, 50, 720, 10, marks=pytest.mark.slow)])
def test_a_model_that_does_not_fit_trains_in_a_cgroup_and_killed_ends_in_the_bits_of_a_resident_run(
        width, layers, limit, kills, tmp_path):
    MemoryCgroup.needed()
    text = (ROOT / "data/gsm8k-mini/chats.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:10 + 2 * kills]
    (tmp_path / "chats.jsonl").write_text("".join(text), encoding="utf-8")
    make_wide_model(tmp_path / "model", tmp_path / "chats.jsonl", width=width, layers=layers)
    with plimsoll.Governor("4GiB") as governor:
        plimsoll.import_chat(tmp_path / "chats.jsonl", tmp_path / "set", tokenizer=tmp_path / "model", governor=governor)
    given = {"data": str(tmp_path / "set"), "model": str(tmp_path / "model"), "sequence_length": 192, "accumulate": 3, "lora_r": 4,
             "lr": 1e-3, "seed": 5, "compute_threads": 1, "foreign_bytes": "64MiB", "held_out": 4, "checkpoint_every_n_steps": 2,
             "progress": False}
    dice = random.Random(kills)

    def life(out, mib):
        return [sys.executable, "-c", LIVES, repr({**given, "out": str(tmp_path / out), "memory_limit": f"{mib}MiB"})]

    calm = subprocess.run(life("calm", 8192), capture_output=True, text=True, timeout=3600)
    assert calm.returncode == 0, calm.stderr[-3000:]
    expected = json.loads(calm.stdout.splitlines()[-1])
    assert expected["weights"] == "resident" and expected["step"] > 2 * kills + 1
    with MemoryCgroup(limit * MIB) as group:
        for kill in range(kills):
            killed(group, life("run", limit), tmp_path / "run", 2 * kill + dice.choice([1, 2, 3]), later=0.3 * dice.random())
        last = group.run(life("run", limit), timeout=3600)
    assert last.returncode == 0 and last.oom_kills == 0, last.stderr[-3000:]
    assert last.last_json == {**expected, "weights": "streamed"} and digest(tmp_path / "run") == digest(tmp_path / "calm")
    assert last.unmapped_peak_bytes <= limit * MIB
    frozen = sum(os.path.getsize(file) for file in (tmp_path / "model").glob("*.safetensors"))
    print(f"{frozen / MIB:.0f} MiB of weights, limit {limit} MiB: {last.unmapped_peak_bytes / MIB:.0f} MiB at most, "
          f"{last.seconds:.0f} s in the last life")
    assert kills == 1 or frozen >= 2 * limit * MIB


def steps_of(run):
    """Steps that a run has told of, in any life."""
    return max((one["step"] for one in events(run, "step")), default=0) if (run / "events.jsonl").exists() else 0


def killed(group, command, run, steps, later=0.0):
    """A life in a cgroup, killed so many seconds after it has made `steps` of the run's."""
    child = group.start(command, stderr=subprocess.PIPE, text=True)
    while steps_of(run) < steps:
        assert child.poll() is None, child.stderr.read()[-3000:]
        time.sleep(0.02)
    time.sleep(later)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stderr.close()

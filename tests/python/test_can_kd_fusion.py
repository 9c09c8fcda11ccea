# SPDX-License-Identifier: Apache-2.0
"""The fusion of the recipe can-kd in Python: what it sees of a graph, by definition; its episodes, beside those that the recipe
of a run made of the same models; and what an evaluation says of them."""
import contextlib
import json
import math
import shutil
import subprocess

import numpy as np
import pytest

import plimsoll

from tests.support.forked import first, forked  # noqa: F401  Fixtures.

from test_can_kd import SMALL as CPP_SMALL, events, train, traffic  # noqa: F401  Fixtures.
from test_cli import call, trains  # noqa: F401  Fixtures.

torch = pytest.importorskip("torch")
from plimsoll.recipes import can_kd
from plimsoll.recipes.can_kd import _evaluate, _fusion, _losses, _models, _tasks

SMALL = {"fusion_episodes": 20, "seed": 42}  # With the sizes of `--config small`.
for role, sizes in (("teacher", ("128,64,24", 2, 16, 24, 3, 4, 8, 2)), ("student", ("16,8,4", 1, 2, 8, 2, 3, 3, 1))):
    SMALL.update(zip((f"{role}_{name}" for name in (
        "vgae_hidden_dims", "vgae_heads", "vgae_embedding_dim", "gat_hidden", "gat_layers", "gat_heads", "gat_embedding_dim",
        "gat_fc_layers")), sizes))


@pytest.fixture
def graphs(traffic):
    with plimsoll.Governor("4GiB") as governor, plimsoll.GraphSet.open(governor, traffic) as made:
        yield made


@pytest.fixture
def models(graphs):
    ids = graphs.table_rows
    autoencoder = _models.Autoencoder(ids, 4, [16, 8, 4], 2, 0.1, seed=1).eval()
    return autoencoder, _models.Classifier(ids, 4, 8, 2, 2, 1, False, 0.1, seed=2).eval()


def test_a_state_has_the_figures_of_its_graph(graphs, models):
    batch, (autoencoder, classifier) = _models.graphs_of(graphs.read(np.r_[3:40, 200:240])), models
    states = _fusion.fusion_states(autoencoder, classifier, batch)
    with torch.no_grad():
        made, logits = autoencoder(batch), classifier(batch)
    errors, chances = _losses.graph_errors(made, batch), torch.softmax(logits, 1).double()
    assert states.shape == (len(batch), 15) and states.dtype == np.float32
    for graph, (begin, end) in enumerate(zip(batch.runs.tolist(), batch.runs.tolist()[1:])):
        latent, spread = made.mean[begin:end].double(), made.log_variance[begin:end].double()
        square = float((batch.features[begin:end].double() - made.reconstruction[begin:end].double()).square().mean())
        q, p = chances[graph].tolist()
        wanted = [float(errors[graph]), square, float(errors[graph]) - square, float(latent.mean()),
                  float(latent.std(correction=0)), float(latent.min()), float(latent.max()), float(spread.mean()),
                  *logits[graph].tolist(), q, p, p - q, -p * math.log(p) - q * math.log(q), max(p, q)]
        assert states[graph].tolist() == pytest.approx(wanted, rel=2e-6, abs=2e-7), graph


def test_a_graphs_state_depends_on_that_graph_alone(graphs, models):
    def states(numbers):
        return _fusion.fusion_states(*models, _models.graphs_of(graphs.read(numbers)))

    together = states(np.arange(60))
    assert np.array_equal(together, np.concatenate([states([graph]) for graph in range(60)]))
    assert np.array_equal(together[::-1], states(np.arange(59, -1, -1)))


def test_a_weight_mixes_the_chance_of_an_attack_with_the_error():
    states = np.zeros((4, 15), np.float32)
    states[:, 0], states[:, 11] = [3, 3, 3, 0], [0.25, 0.25, 0.25, 0.5]
    actions = np.array([20, 0, 10, 5])
    assert _fusion.fused_scores(states, actions, 1.0).tolist() == [0.25, 0.75, 0.5, 0.125]
    assert _fusion.fused_scores(states, actions, math.inf).tolist() == [0.25, 0, 0.125, 0.125]  # No threshold: no anomalies.


@pytest.fixture
def work_of(base, traffic):
    """Makes the fusion of the base run's teacher."""
    with plimsoll.Governor("4GiB") as governor, contextlib.ExitStack() as ends:
        def make(**options):
            asked = can_kd.Options(data=str(traffic), **{**SMALL, **options})
            data = ends.enter_context(contextlib.closing(_tasks.Data(governor, asked)))
            return _fusion.Fusion(asked, data, "teacher", base)

        yield make


def played(work, episodes=None):
    """(losses, rewards) of a fusion's steps, each made with Adam."""
    adam = torch.optim.Adam(work.trained(), lr=work.rate, weight_decay=work.weight_decay)
    losses, terms = [], []
    for episode in work.batches(0, 0) if episodes is None else episodes:
        loss = work.loss(episode)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
        terms.append(work.made(losses[-1], episode))
    return losses, terms


@pytest.fixture(scope="module")
def base(traffic, program, tmp_path_factory):
    """A run with a teacher's models, its fusion among them."""
    out = tmp_path_factory.mktemp("base") / "run"
    subprocess.run([program, "train", "can-kd", "--data", str(traffic), "--out", str(out), "--memory-limit", "1GiB", *CPP_SMALL,
                    "--model-size", "teacher", "--fusion-target-update", "7"], check=True, capture_output=True)
    return out


def test_its_episodes_are_those_of_a_run(base, work_of, tmp_path):
    told = [e for e in events(base, "step") if e["task"] == "teacher_fusion"]
    work = work_of(fusion_target_update=7)
    losses, terms = played(work)
    assert work.finished and [e["reward"] for e in told] == [one["reward"] for one in terms]
    assert [e["epsilon"] for e in told] == pytest.approx([one["epsilon"] for one in terms], rel=1e-12)
    assert [e["loss"] for e in told] == pytest.approx(losses, rel=1e-6)
    [figures] = [e for e in events(base, "epoch") if e["task"] == "teacher_fusion"]
    assert work.end_epoch(work.look_back())["reward"] == pytest.approx(figures["reward"], rel=1e-12)
    work.save(tmp_path / "models/fusion.safetensors")
    theirs, ours = (_tasks.read_tensors(path) for path in (base / "models/teacher_fusion.safetensors", tmp_path / "models/fusion.safetensors"))
    assert theirs.keys() == ours.keys() and theirs["threshold"] == ours["threshold"]
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=1e-4, atol=1e-6)
    assert work.parameters == sum(one.numel() for one in ours.values()) - 1


def test_an_episode_made_again_is_the_same_and_so_is_it_on_any_number_of_threads(work_of):
    before = torch.get_num_threads()
    once, again = work_of(), work_of()
    wanted = played(once)
    try:
        torch.set_num_threads(4)
        again.loss(0)  # A step that was refused, and is tried again.
        assert played(again) == wanted
    finally:
        torch.set_num_threads(before)
    for name, values in once.module.state_dict().items():
        assert torch.equal(values, again.module.state_dict()[name]), name


def test_a_ring_smaller_than_an_episode_keeps_the_last_of_it(work_of):
    small, large = work_of(fusion_replay=50, fusion_batch=64), work_of(fusion_batch=64)
    small.loss(1)
    large.loss(1)
    last = torch.arange(2 * 64 - 50, 2 * 64)
    for name, values in large.ring.state_dict().items():
        assert torch.equal(small.ring.state_dict()[name][last % 50], values[last]), name


def same(ours, theirs, where=""):
    """Of two JSON values: the same keys and counts; other numbers to 1e-5."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            same(ours[key], value, f"{where}.{key}")
    elif isinstance(theirs, list) and theirs and isinstance(theirs[0], (int, float)):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7), where
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("options", [{}, {"fusion_gat": "normal", "gat_jk": "lstm"}], ids=["curriculum", "normal"])
def test_an_evaluation_says_and_writes_what_that_of_a_run_does(train, traffic, tmp_path, options):
    train("run", *(word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)))
    run, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(run / "models", copy / "models")
    asked = can_kd.Options(data=str(traffic), **SMALL, **options)
    with plimsoll.Governor("4GiB") as governor, contextlib.closing(_tasks.Data(governor, asked)) as data:
        told, text = _evaluate.evaluate(asked, data, copy, True)
        with contextlib.closing(_tasks.Data(governor, asked, None, lambda: True)) as stopped, pytest.raises(_tasks.Stopped):
            _evaluate.evaluate(asked, stopped, copy, True)
    theirs, ours = (json.loads((folder / "evaluation.json").read_text()) for folder in (run, copy))
    same(ours, theirs)
    curves = ours.pop("curves")
    assert ours == told and curves.keys() == told.keys()
    assert (copy / "evaluation.txt").read_text() == text == (run / "evaluation.txt").read_text()

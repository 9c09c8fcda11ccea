# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself, and of what its program hands over: figures that are right, errors in the program's words."""
import collections
import json
import re
import warnings

import numpy as np
import pytest

import plimsoll
from plimsoll.cli import _program

torch = pytest.importorskip("torch")

ITEMS = [(torch.full((3,), float(k)), k % 2) for k in range(32)]  # 8 batches of 4.


class Endless:
    """Batches of no known length."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(torch.utils.data.default_collate(ITEMS[k:k + 4]) for k in range(0, 4 * self.batches, 4))


class Life:
    """A run with a model that is tracked."""

    def __init__(self, path):
        self.run = plimsoll.Run(path, memory_limit="4GiB", seed=1)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run.track(model=self.model, optimizer=self.optimizer)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.run.__exit__(*raised)

    def loss(self, x, y):
        return torch.nn.functional.cross_entropy(self.model(x), y)

    def batches(self, data=None, **options):
        data = self.run.loader(ITEMS, batch_size=4) if data is None else data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # Data without a position.
            return self.run.steps(data, **{"progress": False, **options})

    def step(self, f=None, **options):
        """In the first batch of a loop."""
        for batch in self.batches():
            return self.run.step(f or self.loss, batch, **options)

    def status(self):
        return plimsoll.status(self.run.path)


@pytest.fixture
def life(tmp_path):
    with Life(tmp_path / "run") as one:
        yield one


def shown(path, capfd):
    assert _program.main(["status", str(path)]) == 0
    return capfd.readouterr().out


# ---- S35: figures ----

def test_s35_the_line_of_data_without_a_length_has_step_loss_and_speed(life, capfd, monkeypatch):
    monkeypatch.setattr("plimsoll.run._run_report._BAR_EVERY", 0.0)
    monkeypatch.setattr("plimsoll.run._run_report._STATUS_EVERY", 0.0)
    for batch in life.batches(Endless(5), epochs=2, progress=True):
        life.run.step(life.loss, batch)
    line = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("running"))
    assert re.match(r"running epoch 1/2 step \d+ loss \d\.\d{4} \d+ rows/s, .* resident of", line), line
    status = life.status()
    assert status["steps_total"] is None and status["seconds_left"] is None and status["step"] == 10
    assert "  step      10, epoch 2 of 2\n" in shown(life.run.path, capfd)


def test_s35_a_run_of_data_without_a_length_that_goes_on_knows_no_total_either(tmp_path, capfd):
    for stops_at in (3, 99):
        with Life(tmp_path / "run") as life:
            for batch in life.batches(Endless(5)):
                life.run.step(life.loss, batch)
                if life.run.steps_made + 1 == stops_at:
                    plimsoll.stop(life.run.path)
            assert life.status()["steps_total"] is None
    text = shown(tmp_path / "run", capfd)
    assert "  step      5, epoch 1 of 1\n" in text and "left" not in text


def test_s35_a_known_length_is_told_with_what_is_left(life, capfd, monkeypatch):
    monkeypatch.setattr("plimsoll.run._run_report._STATUS_EVERY", 0.0)
    left = []
    for batch in life.batches(epochs=2):
        life.run.step(life.loss, batch)
        left.append((life.status()["steps_total"], life.status()["seconds_left"]))
    assert {total for total, _ in left} == {16} and left[0][1] is None and left[-1][1] > 0
    assert "  step      16 of 16, epoch 2 of 2\n" in shown(life.run.path, capfd)


@pytest.mark.parametrize("stop", [1, 4, 8, 9, 12])
def test_s35_a_break_counts_its_step_at_once_and_ends_in_its_epoch(tmp_path, capfd, stop):
    with Life(tmp_path / "run") as life:
        for k, batch in enumerate(life.batches(epochs=2)):
            life.run.step(life.loss, batch)
            assert life.run.steps_made == k  # The step that is being made is not counted.
            if k + 1 == stop:
                break
        assert life.run.steps_made == stop and f"step {stop}>" in repr(life.run)
        life.run.log(after=1.0)
    assert life.run.steps_made == stop
    assert f"  step      {stop} of 16, epoch {1 if stop <= 8 else 2} of 2\n" in shown(life.run.path, capfd)
    events = list(map(json.loads, (life.run.path / "events.jsonl").read_text().splitlines()))
    assert next(one["step"] for one in events if "after" in one) == stop


def test_s35_a_body_that_raises_makes_no_step_of_one_that_was_refused(life):
    with pytest.raises(ValueError):
        for batch in life.batches():
            life.run.step(lambda x, y: None, batch)
    assert life.run.steps_made == 0
    with pytest.raises(KeyError):
        for batch in life.batches():
            life.run.step(life.loss, batch)
            raise KeyError
    assert life.run.steps_made == 1  # As by `break`.


class Placed(Endless):
    """As a set of tokens gives its batches: it has its place, and no length."""

    place = (0, 0, 0)

    def seek(self, place):
        self.place = place


def test_s47_the_steps_of_an_inbox_are_not_counted_to_the_end_of_the_file_before(life, capfd, monkeypatch):
    monkeypatch.setattr("plimsoll.run._run_report._BAR_EVERY", 0.0)
    monkeypatch.setattr("plimsoll.run._run_report._STATUS_EVERY", 0.0)
    for file in (Placed(3), Placed(4)):
        for batch in life.batches(file, progress=True):
            life.run.step(life.loss, batch)
            assert life.status()["steps_total"] is None
    lines = capfd.readouterr().err
    assert re.search(r"step \d+ loss", lines) and not re.search(r"step \d+/", lines)
    assert "  step      7, epoch 2 of 2\n" in shown(life.run.path, capfd)


def test_s35_without_a_loss_none_is_shown(life, capfd):
    for _ in life.batches(Endless(2)):
        pass
    assert life.status()["loss"] is None and "  loss      -\n" in shown(life.run.path, capfd)


# ---- S36: what a step's function returns ----

Output = collections.namedtuple("Output", "loss logits")


class ModelOutput(collections.OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Holder:
    def __init__(self, loss):
        self.loss = loss


RETURNED = [
    (lambda loss: {"loss": loss}, 'returned a dict, and a step needs the loss, a tensor of one number: return its entry "loss"'),
    (lambda loss: ModelOutput(loss=loss, logits=loss), 'returned a ModelOutput.*return its entry "loss"'),
    (lambda loss: ModelOutput(loss=None, logits=loss), 'its entry "loss" is None: call the model with labels'),
    (lambda loss: {"logits": loss}, "its entries are logits: return the one that is the loss"),
    (lambda loss: Output(loss, loss), "returned an Output.*return its attribute `loss`"),
    (lambda loss: (loss, loss), "returned a tuple.*return the one of its entries that is the loss"),
    (lambda loss: [loss], "returned a list"),
    (Holder, "returned a Holder.*return its attribute `loss`"),
    (lambda loss: None, "returned nothing.*end it with `return loss`"),
    (lambda loss: 3, r"returned an int.*without item\(\)"),
    (lambda loss: loss.item(), r"returned a float.*without item\(\)"),
    (lambda loss: loss.detach().numpy(), "returned a ndarray"),
    (lambda loss: np.float32(1), "returned a float32"),
    (lambda loss: "0.5", "returned a str"),
    (lambda loss: loss * torch.ones(8), r"a tensor of shape \[8\], and the loss is one number: return its mean\(\)"),
    (lambda loss: loss * torch.ones(2, 0), r"a tensor of shape \[2, 0\]"),
    (lambda loss: loss + 1j, "returned a complex number"),
    (lambda loss: loss.detach(), "has no gradient: nothing that it was computed from requires one"),
    (lambda loss: torch.tensor(3), "has no gradient"),
]


def test_s36_what_is_no_loss_is_refused_in_the_callers_words(life):
    before = [one.clone() for one in life.model.parameters()]
    for change, said in RETURNED:
        with pytest.raises(ValueError, match="step: .*" + said):
            life.step(lambda x, y, change=change: change(life.loss(x, y)))
    assert all(map(torch.equal, before, life.model.parameters()))


def test_s36_a_frozen_model_has_no_gradient(life):
    life.model.requires_grad_(False)
    with pytest.raises(ValueError, match="has no gradient.*parameters that are not frozen"):
        life.step()


def test_s36_a_loss_of_one_entry_is_one_number(life):
    assert life.step(lambda x, y: life.loss(x, y).reshape(1, 1)) > 0


def test_s36_a_contrastive_loss_is_checked_too():
    model = torch.nn.Linear(3, 2)
    step = plimsoll.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="contrastive")
    with pytest.raises(ValueError, match="returned a dict"):
        step.contrastive(torch.ones(4, 3), model, lambda rows: {"loss": rows.sum()})


# ---- S36: optimizers ----

class Sharpness(torch.optim.SGD):
    """As sharpness-aware ones are written."""

    def step(self, closure):
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
def test_s36_an_optimizer_that_takes_a_closure_is_refused_by_name(tmp_path, kind):
    with plimsoll.Run(tmp_path / "run", memory_limit="4GiB") as run:
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1)
        run.track(model=model, optimizer=optimizer, schedule=torch.optim.lr_scheduler.ConstantLR(optimizer))
        for batch in run.steps([torch.ones(4, 3)], progress=False):
            with pytest.raises(ValueError, match=rf"optimizer: {kind.__name__}.step\(\) needs a closure"):
                run.step(lambda x: model(x).square().mean(), batch)


def lbfgs(path, stops_at=99):
    """A loop that makes its own steps, as that error says."""
    with plimsoll.Run(path, memory_limit="4GiB", seed=5) as run:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        run.track(model=model, optimizer=optimizer)
        for x, y in run.steps(run.loader(ITEMS, batch_size=4), progress=False):
            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (model(x / 32).squeeze(1) - y).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            if run.steps_made + 1 == stops_at:
                plimsoll.stop(path)
        return [one.detach().clone() for one in model.parameters()]


def test_s36_a_loop_with_a_closure_of_its_own_goes_on_with_the_same_bits(tmp_path):
    whole = lbfgs(tmp_path / "whole")
    lbfgs(tmp_path / "run", stops_at=3)
    assert all(map(torch.equal, whole, lbfgs(tmp_path / "run")))


# ---- S36: metrics and options ----

def test_s36_a_metric_with_a_graph_is_logged_without_a_warning_and_keeps_it(life):
    loss = life.loss(torch.ones(2, 3), torch.tensor([0, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        life.run.log(loss=loss, one=torch.ones(1, 1), array=np.ones((1,)), whole=np.int64(2), flag=True)
    assert loss.requires_grad and loss.grad_fn is not None
    event = json.loads((life.run.path / "events.jsonl").read_text().splitlines()[-1])
    assert event["loss"] == pytest.approx(loss.item()) and (event["one"], event["array"], event["whole"]) == (1, 1, 2)


METRICS = [
    ("abc", "log: note: 'abc' is a text"), ("1.5", "log: note: '1.5' is a text"), (None, "log: note: None is not a number"),
    (torch.ones(2), r"log: note: its shape is \[2\]"), (np.ones((2, 3)), r"its shape is \[2, 3\]"), ([1.0], r"\[1.0\] is not a number"),
    ({"a": 1}, "is not a number"), (torch.ones(()) * 1j, "is not a number"), (10 ** 400, "is not a number"),
]


def test_s36_a_metric_that_is_no_number_is_named(life):
    for value, said in METRICS:
        with pytest.raises(ValueError, match=said):
            life.run.log(note=value)


OF_RUNS = [
    ({"seed": "abc"}, "Run: seed 'abc' must be a whole number"), ({"seed": 1.5}, "Run: seed 1.5 must be a whole number"),
    ({"seed": -1}, "Run: seed -1 must be 0 or more"), ({"rank_stopped_seconds": "abc"}, "rank_stopped_seconds 'abc' must be a number"),
    ({"virtual_workers": "abc"}, "virtual_workers 'abc' must be a whole number"),
    ({"compute_threads": "two"}, "compute_threads 'two' must be a whole number"),
]
OF_LOOPS = [
    ({"epochs": "3"}, "steps: epochs '3' must be a whole number"), ({"epochs": 2.5}, "steps: epochs 2.5 must be"),
    ({"commit_every_minutes": "abc"}, "steps: commit_every_minutes 'abc' must be a number"),
    ({"commit_every_steps": "abc"}, "steps: commit_every_steps 'abc' must be a whole number"),
]
OF_STEPS = [({"clip_norm": "abc"}, "clip_norm: 'abc' must be a number"), ({"accumulate": "2"}, "accumulate: '2' must be a whole number")]


def test_s36_an_option_that_is_no_number_is_named(tmp_path):
    for options, said in OF_RUNS:
        with pytest.raises(ValueError, match=said):
            plimsoll.Run(tmp_path / "run", memory_limit="4GiB", **options)
    assert not (tmp_path / "run").exists()
    with Life(tmp_path / "run") as life:
        for options, said in OF_LOOPS:
            with pytest.raises(ValueError, match=said):
                life.batches(**options)
        for options, said in OF_STEPS:
            with pytest.raises(ValueError, match=said):
                life.step(**options)


# ---- S37 ----

def test_s37_a_table_names_the_optimizer_that_it_has_by_default(tmp_path):
    assert "plimsoll.AdamW(lr=0.001)" in plimsoll.Run.embedding.__doc__
    for given, named in ((None, "AdamW(lr=0.001"), (plimsoll.SGD(lr=0.5), "SGD(lr=0.5")):
        with plimsoll.Run(tmp_path / named[:3], memory_limit="4GiB") as run:
            vectors = run.embedding("items", rows=8, dim=2, optimizer=given)
            assert f"optimizer={named}" in repr(vectors)
            vectors.store.set_optimizer(plimsoll.AdamW(lr=0.25) if given is None else plimsoll.SGD(lr=0.25))
            assert "lr=0.25" in repr(vectors)


def test_s37_nested_results_of_a_recipe_are_words_for_people():
    from plimsoll.recipes import Told, _json_of, _text_of

    entries = {"status": "finished", "parts_bytes": {"static": 2048, "gradients": 0}, "held": {"rows": 3}, "sizes": [8, 12],
               "checks": [{"rows": 8, "right": True}], "loss": 0.25, "stop": None, "peak_bytes": 1 << 20}
    text = _text_of(entries)
    assert not set("{}[]'") & set(text) and "None" not in text, text
    assert "static 2.0 KiB, gradients 0 B" in text and "8; 12" in text and "rows 8, right True" in text and "1.0 MiB" in text
    assert json.loads(_json_of(Told(entries, "words")))["held"] == {"rows": 3} and Told(entries, "words").text == "words"


def test_events_of_ones_own(life):
    with life:
        life.step()
        life.run.event("preview", name="a", text="b", count=1, share=2.5, whole=True)
        for value in (object(), b"bytes", [1], None):
            with pytest.raises(TypeError, match=f"event: wrong is a {type(value).__name__}, where a text or a number is needed"):
                life.run.event("preview", wrong=value)
        assert life.run.is_writer
    told, = (one for one in map(json.loads, (life.run.path / "events.jsonl").read_text().splitlines()) if one["event"] == "preview")
    assert {key: value for key, value in told.items() if key != "time"} == {
        "event": "preview", "name": "a", "text": "b", "count": 1, "share": 2.5, "whole": True}
    with pytest.raises(ValueError, match="this run was closed"):
        life.run.event("late")


def test_a_loop_that_was_left_is_committed_where_that_is_asked_for(life):
    with life:
        for batch in life.batches():
            life.run.step(life.loss, batch)
            break
        assert life.status()["checkpoint_step"] == -1
        life.run.end_loop()
        assert life.status()["checkpoint_step"] == 1
        life.run.end_loop()  # None is left.
        assert life.run.steps_made == 1

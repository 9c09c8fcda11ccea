# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint and load_checkpoint: whole or not there, checked, and every random number the same."""
import os
import random
import resource
import signal
import zipfile

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import plimsoll
from plimsoll import load_checkpoint, save_checkpoint


class Part:
    """A part with a state of our choice."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def training(seed: int = 0) -> dict:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "generator": torch.Generator().manual_seed(seed),
            "schedule": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)}


def steps(parts: dict, count: int) -> list[float]:
    """Losses of steps that draw from every generator there is."""
    losses = []
    for _ in range(count):
        x = torch.randn(6, 4) + random.random() + float(np.random.standard_normal())
        x = x + torch.randn(6, 4, generator=parts["generator"])
        parts["optimizer"].zero_grad()
        loss = parts["model"](x).square().mean()
        loss.backward()
        parts["optimizer"].step()
        parts["schedule"].step()
        losses.append(loss.item())
    return losses


def test_r31_a_resumed_loop_has_the_same_losses(tmp_path):
    one = training()
    random.gauss(0, 1), np.random.standard_normal()  # Both keep a second number back.
    steps(one, 5)
    save_checkpoint(tmp_path / "a" / "b", 5, **one)
    rest = steps(one, 5)
    other = training(seed=9)
    steps(other, 3)
    assert load_checkpoint(tmp_path / "a" / "b", **other) == 5
    assert steps(other, 5) == rest
    assert load_checkpoint(tmp_path / "a" / "b", 5, **other) == 5  # And again.
    assert steps(other, 5) == rest


@pytest.mark.filterwarnings("error")
def test_another_bit_generator_of_numpy_is_kept(tmp_path):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        np.random.standard_normal(), np.random.randint(9, dtype=np.uint32)
        plimsoll.save_checkpoint(tmp_path, 1, model=torch.nn.Linear(1, 1))
        wanted = np.random.standard_normal(3), np.random.randint(1 << 30, size=3, dtype=np.uint32)
        assert plimsoll.load_checkpoint(tmp_path, 1, model=torch.nn.Linear(1, 1)) == 1
        np.testing.assert_array_equal((np.random.standard_normal(3), np.random.randint(1 << 30, size=3, dtype=np.uint32)),
                                      wanted)
    finally:
        np.random.set_bit_generator(before)


def test_where_nothing_was_saved_or_committed_nothing_is_loaded(tmp_path):
    part = Part(3)
    assert load_checkpoint(tmp_path / "none", part=part) == 0
    save_checkpoint(tmp_path, 7, part=Part(4))
    assert load_checkpoint(tmp_path, -1, part=part) == 0 and part.value == 3  # No commit: begin anew.
    assert load_checkpoint(tmp_path, part=part) == 7 and part.value == 4
    with pytest.raises(plimsoll.NotFoundError, match="no checkpoint of step 8; there: 7"):
        load_checkpoint(tmp_path, 8, part=part)


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


def test_the_last_two_stay_and_an_undone_life_goes(tmp_path):
    (tmp_path / "step-100.pt").write_text("of somebody else")
    for step in (0, 100, 200, 300):
        save_checkpoint(tmp_path, step, part=Part(step))
    assert names(tmp_path) == ["step-000000200.pt", "step-000000300.pt", "step-100.pt"]
    save_checkpoint(tmp_path, 250, part=Part(1))  # 300 was never committed; the loop came back from 200.
    assert names(tmp_path) == ["step-000000200.pt", "step-000000250.pt", "step-100.pt"]
    save_checkpoint(tmp_path, 260, part=Part(1), keep=1)
    assert names(tmp_path) == ["step-000000260.pt", "step-100.pt"]


def test_t13_the_newest_is_so_by_number_and_backups_stay(tmp_path):
    """By its letters step-1000000000.pt comes before step-999999999.pt."""
    backups = ["step-1000000002.pt.bak", "step-5000.pt", "step-000000900 (copy).pt"]
    for name in backups:
        (tmp_path / name).write_text("mine")
    for step in (900, 1000, 999_999_999, 1_000_000_000):
        save_checkpoint(tmp_path, step, part=Part(step))
    part = Part()
    assert load_checkpoint(tmp_path, part=part) == part.value == 1_000_000_000
    assert names(tmp_path) == sorted([*backups, "step-1000000000.pt", "step-999999999.pt"])


def test_a_kill_while_saving_leaves_the_one_before(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 1, part=Part(1))
    for name in ("fsync", "replace"):
        child = os.fork()
        if child == 0:
            monkeypatch.setattr(os, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            save_checkpoint(tmp_path, 1, part=Part(2))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        part = Part()
        assert load_checkpoint(tmp_path, part=part) == 1 and part.value == 1
    save_checkpoint(tmp_path, 2, part=Part(2))
    assert names(tmp_path) == ["step-000000001.pt", "step-000000002.pt"]


def test_a_full_disk_is_an_os_error_and_leaves_the_one_before(tmp_path):
    save_checkpoint(tmp_path, 1, part=Part(torch.zeros(1 << 20)))
    before = (resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[0][1]))
    try:
        with pytest.raises(OSError, match="the checkpoint of step 2 was not saved"):
            save_checkpoint(tmp_path, 2, part=Part(torch.zeros(1 << 20)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert names(tmp_path) == ["step-000000001.pt"]


def test_a_link_in_the_way_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".checkpoint.partial").symlink_to(tmp_path / "victim")
    (tmp_path / "c" / "step-000000001.pt").symlink_to(tmp_path / "victim")
    save_checkpoint(tmp_path / "c", 1, part=Part(1))
    assert (tmp_path / "victim").read_text() == "mine" and load_checkpoint(tmp_path / "c", part=Part()) == 1


def test_damage_is_found(tmp_path):
    """Any flipped bit gives CorruptError, or the same values: never others."""
    values = torch.arange(40.0)
    save_checkpoint(tmp_path, 1, part=Part([values, 0.5]))
    path = tmp_path / "step-000000001.pt"
    good, noticed = path.read_bytes(), 0
    for seed in range(300):
        bit = random.Random(seed).randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        part = Part()
        try:
            load_checkpoint(tmp_path, 1, part=part)
        except plimsoll.CorruptError as error:
            assert str(path) in str(error)
            noticed += 1
        else:
            assert torch.equal(part.value[0], values) and part.value[1] == 0.5, f"bit {bit}"
    assert noticed > 100
    path.write_bytes(good[:1000])
    with pytest.raises(plimsoll.CorruptError):
        load_checkpoint(tmp_path, 1, part=Part())
    save_checkpoint(tmp_path, 2, part=Part())
    os.replace(tmp_path / "step-000000002.pt", path)
    with pytest.raises(plimsoll.CorruptError, match="not the checkpoint of step 1"):
        load_checkpoint(tmp_path, 1, part=Part())


def test_a_hostile_checkpoint_runs_nothing(tmp_path):
    class Bad:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"step": 1, "parts": {"part": Bad()}, "random": {}}, tmp_path / "step-000000001.pt")
    assert zipfile.is_zipfile(tmp_path / "step-000000001.pt")
    with pytest.raises(plimsoll.CorruptError):
        load_checkpoint(tmp_path, part=Part())
    assert not (tmp_path / "ran").exists()


def test_wrong_use_is_named_before_anything_changes(tmp_path):
    save_checkpoint(tmp_path, 1, a=Part(1), b=Part(2))
    part = Part(9)
    with pytest.raises(ValueError, match="holds a, b, and load_checkpoint was given a, c"):
        load_checkpoint(tmp_path, a=part, c=part)
    with pytest.raises(ValueError, match="a: int has no state_dict"):
        load_checkpoint(tmp_path, a=3, b=part)
    with pytest.raises(ValueError, match="b: int has no state_dict"):
        save_checkpoint(tmp_path, 2, a=part, b=3)
    with pytest.raises(ValueError, match=r"a\['value'\]\[1\] is a numpy.float64: a checkpoint holds"):
        save_checkpoint(tmp_path, 2, a=Part([1, np.float64(2)]))
    with pytest.raises(ValueError, match="step -1 must be 0 or more"):
        save_checkpoint(tmp_path, -1, a=part)
    assert part.value == 9 and names(tmp_path) == ["step-000000001.pt"]


def test_a_loader_is_a_part(governor, tmp_path):
    plimsoll.import_dataset([float(k) for k in range(50)], tmp_path / "f", governor=governor)
    with plimsoll.Loader.open(governor, tmp_path / "f", batch_rows=8, seed=3) as loader:
        loader.next()
        save_checkpoint(tmp_path / "c", 1, loader=loader)
        rest = [batch.ids.tolist() for batch in loader]
    with plimsoll.Loader.open(governor, tmp_path / "f", batch_rows=8) as loader:
        load_checkpoint(tmp_path / "c", loader=loader)
        assert [batch.ids.tolist() for batch in loader] == rest

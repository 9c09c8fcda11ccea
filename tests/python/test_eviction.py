# SPDX-License-Identifier: Apache-2.0
"""What caches hold above their floors is given back before anything ends a program, by itself, and comes again."""
import sys

import pytest

from tests.support.cgroup import MemoryCgroup

pytest.importorskip("torch")

LIMIT = 768 << 20
# `kind`: whose slab of some 116 MiB is full of changed rows; `what` grows until the program is ended.
PROGRAM = """
import sys, tempfile
import numpy as np, torch, plimsoll
from plimsoll.compat import TrainableEmbeddingManager
kind, what = sys.argv[1:]
ROWS, DIM = 200_000, 128
folder = tempfile.mkdtemp(dir=sys.path[0] or ".")
if kind == "compat":
    table = TrainableEmbeddingManager(range(ROWS), DIM, storage_mode="disk", embeddings_dir=folder,
                                      cache_l1_size_mb=64, cache_l2_size_mb=64, auto_sync=False)
    read, change = table.get_embeddings, lambda ids: table.update_embeddings(ids, torch.ones(len(ids), DIM))
    governor = plimsoll.Governor.current()
else:
    governor = plimsoll.Governor()
    table = plimsoll.EmbeddingStore.open(governor, folder + "/t", rows=ROWS, dim=DIM, store_bytes="116MiB")
    read, change = table.gather, lambda ids: table.apply(ids, np.ones((len(ids), DIM), np.float32))
def held():
    return governor.ledger().pools["rows"].leased_bytes
for begin in range(0, ROWS, 1000):
    read(np.arange(begin, begin + 1000))
    change(np.arange(begin, begin + 1000))
first, kept = held(), []
assert first > 100 << 20, first
grow = {"arrays": lambda: np.ones(8 << 17), "tensors": lambda: torch.ones(8 << 18)}[what]
step = 0
try:
    while True:
        kept.append(grow())
        step += 1
        if step % 4 == 0:
            read(np.random.default_rng(step).integers(0, ROWS, 256))
except (plimsoll.MemoryPressure, plimsoll.BudgetExceeded, RuntimeError) as error:
    print(type(error).__name__, held() >> 20, flush=True)
    least = held()
assert least <= 16 << 20, least
kept.clear()
if what == "tensors":
    torch.ones(8)
for _ in range(200):
    governor.step_boundary()
    if held() > least:
        break
print("again", held() > least)
if kind == "compat":
    assert (read(np.arange(0, ROWS, 997)) == 1).all()
"""


@pytest.mark.parametrize("what", ["arrays", "tensors"])
@pytest.mark.parametrize("kind", ["compat", "store"])
def test_s40_a_full_slab_of_changed_rows_is_given_back_before_the_program_ends(kind, what, tmp_path):
    MemoryCgroup.needed()
    (tmp_path / "program.py").write_text(PROGRAM)
    with MemoryCgroup(LIMIT) as group:
        done = group.run([sys.executable, "-W", "ignore", tmp_path / "program.py", kind, what])
    assert done.returncode == 0 and done.oom_kills == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "again True" in lines, done.stdout
    if kind == "compat":
        said = "High memory usage detected - triggering adaptive cache eviction"
        assert sum(said in line for line in lines) >= 1, done.stdout
        assert any(line.startswith("Memory usage after cache eviction: ") for line in lines)

# SPDX-License-Identifier: Apache-2.0
"""The fused optimizers against torch.optim, over many steps of random gradients.

Every row is in every request, so that torch's dense optimizers, which touch all rows each step, do
the same work. Tolerance: both round each operation to float32 but not in the same places, 1e-5 of
the largest weight after 50 steps; SparseAdam besides places eps elsewhere (eps is 1e-10 here).
"""
import numpy as np
import pytest

import plimsoll

ROWS, DIM, STEPS = 23, 37, 50


def ours(governor, directory, optimizer, start, grads):
    table = plimsoll.EmbeddingStore.open(governor, directory, rows=ROWS, dim=DIM, store_bytes="8MiB",
                                         optimizer=optimizer, init=plimsoll.Zeros())
    ids = np.arange(ROWS)
    table.update(ids, start)
    for grad in grads:
        table.apply(ids, grad)
    return table.gather(ids).array


@pytest.fixture
def start():
    return np.random.default_rng(11).normal(size=(ROWS, DIM)).astype(np.float32)


@pytest.fixture
def grads():
    return np.random.default_rng(12).normal(size=(STEPS, ROWS, DIM)).astype(np.float32)


@pytest.mark.parametrize("optimizer, name, options", [
    (plimsoll.AdamW(lr=0.02, weight_decay=0.1), "AdamW", {"weight_decay": 0.1}),
    (plimsoll.Adam(lr=0.02, weight_decay=0.1), "Adam", {"weight_decay": 0.1}),
    (plimsoll.Adam(lr=0.02, betas=(0.8, 0.95)), "Adam", {"betas": (0.8, 0.95)}),
    (plimsoll.Adam(lr=0.02, eps=1e-10), "SparseAdam", {"eps": 1e-10}),
    (plimsoll.Adagrad(lr=0.02, weight_decay=0.1), "Adagrad", {"weight_decay": 0.1}),
    (plimsoll.SGD(lr=0.02, weight_decay=0.1), "SGD", {"weight_decay": 0.1}),
    (plimsoll.SGD(lr=0.02, momentum=0.9, weight_decay=0.1), "SGD",
     {"momentum": 0.9, "weight_decay": 0.1}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_follows_torch(governor, tmp_path, start, grads, optimizer, name, options):
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.from_numpy(start.copy()))
    theirs = getattr(torch.optim, name)([weights], lr=0.02, **options)
    every_row = torch.arange(ROWS)[None]
    for grad in grads:
        grad = torch.from_numpy(grad)
        weights.grad = grad if name != "SparseAdam" else torch.sparse_coo_tensor(
            every_row, grad, grad.shape, is_coalesced=True, check_invariants=False)
        theirs.step()
    wanted = weights.detach().numpy()
    got = ours(governor, tmp_path / "t", optimizer, start, grads)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_row_adagrad_keeps_one_number_a_row(governor, tmp_path, start, grads):
    weights, sums = start.astype(np.float64), np.zeros((ROWS, 1))
    for grad in grads.astype(np.float64):
        grad = grad + 0.1 * weights
        sums += (grad**2).mean(axis=1, keepdims=True)
        weights -= 0.02 * grad / (np.sqrt(sums) + 1e-10)
    got = ours(governor, tmp_path / "t", plimsoll.RowAdagrad(lr=0.02, weight_decay=0.1), start,
               grads)
    np.testing.assert_allclose(got, weights, rtol=0, atol=1e-5 * np.abs(weights).max())


def test_a_table_is_opened_again_by_the_name_of_its_optimizer(governor, tmp_path):
    for number, optimizer in enumerate((plimsoll.RowAdagrad(), plimsoll.SGD(), plimsoll.Adam(),
                                        plimsoll.SGD(momentum=0.5))):
        path = tmp_path / str(number)
        with plimsoll.EmbeddingStore.open(governor, path, rows=5, dim=3, store_bytes="8MiB",
                                          optimizer=optimizer) as table:
            table.apply([1], np.ones((1, 3), np.float32))
            table.commit(1)
            before = table.gather([1]).array
        with plimsoll.EmbeddingStore.open(governor, path, store_bytes="8MiB") as table:
            assert np.array_equal(table.gather([1]).array, before)
        with pytest.raises(ValueError, match="optimizer.kind"):
            plimsoll.EmbeddingStore.open(governor, path, optimizer=plimsoll.Adagrad())

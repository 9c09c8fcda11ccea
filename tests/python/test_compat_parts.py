# SPDX-License-Identifier: Apache-2.0
"""Constraints, regularisers, the scheduler, first rows from features and clusters."""
import numpy as np
import pytest

from plimsoll.core import _folders
from plimsoll.compat import (EmbeddingInitializer, EmbeddingScheduler, FeatureManager,
                             TrainableEmbeddingManager, constraint_gradient,
                             constraint_loss)
from plimsoll.compat._initial import k_means

torch = pytest.importorskip("torch")
KINDS = ["similarity", "diversity", "l1", "l2", "orthogonal"]


def plain(kind, rows):
    """Straight from the definitions, with an n × n matrix."""
    n = len(rows)
    if kind == "l1":
        return np.abs(rows).sum() / n
    if kind == "l2":
        return (rows ** 2).sum() / n
    if kind == "orthogonal":
        return ((rows @ rows.T - np.eye(n)) ** 2).sum() / n ** 2
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1), 1e-15)[:, None]
    pairs = (unit @ unit.T)[~np.eye(n, dtype=bool)]
    return 1 - pairs.mean() if kind == "similarity" else (pairs ** 2).mean()


def test_r05_folders_are_synced_before_anything_is_put_into_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(_folders, "sync_folder", synced.append)
    _folders.make_folders(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert (tmp_path / "a" / "b" / "c").is_dir()
    _folders.make_folders(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_match_the_definition_and_torch(kind):
    rows = np.random.default_rng(3).standard_normal((9, 5))
    assert constraint_loss(kind, rows) == pytest.approx(plain(kind, rows), rel=1e-12)
    leaf = torch.tensor(rows, requires_grad=True)
    loss = constraint_loss(kind, leaf)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(plain(kind, rows), rel=1e-12)
    assert np.allclose(constraint_gradient(kind, rows), leaf.grad.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_and_rows_of_zeros_give_numbers(kind):
    for rows in (np.ones((1, 4)), np.zeros((3, 4))):
        assert np.isfinite(constraint_loss(kind, rows))
        assert np.isfinite(constraint_gradient(kind, rows)).all()
    with pytest.raises(ValueError, match="magic"):
        constraint_loss("magic", np.ones((2, 2)))


@pytest.fixture
def manager(governor, tmp_path):
    with TrainableEmbeddingManager(range(40), 6, storage_mode="disk", seed=4,
                                   embeddings_dir=tmp_path / "e") as one:
        one.update_embeddings(range(40), torch.tensor(
            np.random.default_rng(4).standard_normal((40, 6)), dtype=torch.float32))
        yield one


@pytest.mark.parametrize("kind", KINDS)
def test_applying_a_term_lowers_it(manager, kind):
    scheduler = EmbeddingScheduler(manager)
    add = scheduler.add_constraint if kind in ("similarity", "diversity") else (
        scheduler.add_regularizer)
    add(kind, weight=1.0)
    losses = [scheduler.apply(range(40), learning_rate=0.2) for _ in range(10)]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:]))
    assert float(scheduler.loss(manager.get_embeddings(range(40)))) < losses[-1]


def test_terms_hold_in_their_epochs_only(manager):
    scheduler = EmbeddingScheduler(manager)
    scheduler.add_constraint("diversity", weight=0.5, start_epoch=2, end_epoch=4)
    scheduler.add_regularizer("l2", weight=0.1, start_epoch=3)
    seen = []
    for epoch in range(5):
        scheduler.set_epoch(epoch)
        seen.append([kind for kind, _ in scheduler.active()])
    assert seen == [[], [], ["diversity"], ["diversity", "l2"], ["l2"]]
    rows = manager.get_embeddings(range(40)).requires_grad_()
    scheduler.set_epoch(3)
    scheduler.loss(rows).backward()
    expected = 0.5 * constraint_gradient("diversity", rows.detach().double().numpy()) + (
        0.1 * constraint_gradient("l2", rows.detach().double().numpy()))
    assert np.allclose(rows.grad, expected, atol=1e-6)
    scheduler.set_epoch(0)
    before = manager.get_embeddings(range(40))
    assert scheduler.apply(range(40), 0.1) == 0.0
    assert torch.equal(manager.get_embeddings(range(40)), before)
    for wrong in (lambda: scheduler.add_constraint("l1"), lambda: scheduler.add_regularizer("x"),
                  lambda: scheduler.add_regularizer("l1", weight=float("nan"))):
        with pytest.raises(ValueError):
            wrong()


def groups(seed=0):
    random = np.random.default_rng(seed)
    centres = random.standard_normal((3, 10)) * 10
    label = np.arange(90) % 3
    return centres[label] + random.standard_normal((90, 10)) * 0.1, label


def test_k_means_finds_groups_that_are_apart():
    rows, label = groups()
    centres, nearest = k_means(rows, 3, seed=1)
    for group in range(3):
        assert len(set(nearest[label == group])) == 1
        assert np.allclose(centres[nearest[label == group][0]], rows[label == group].mean(0))
    assert np.array_equal(k_means(rows, 3, seed=1)[1], nearest)
    assert len(np.unique(k_means(rows[:5], 5, seed=1)[1])) == 5


@pytest.mark.parametrize("kind", ["kmeans", "gmm"])
def test_rows_from_clusters_are_near_within_and_far_between(kind):
    rows, label = groups()
    first = EmbeddingInitializer(2, seed=3).from_clusters(rows, 3, kind=kind)
    assert first.shape == (90, 2) and first.dtype == np.float32
    for group in range(3):
        assert np.ptp(first[label == group], axis=0).max() < 1e-3
    means = np.stack([first[label == group].mean(0) for group in range(3)])
    assert min(np.linalg.norm(means[a] - means[b]) for a, b in ((0, 1), (0, 2), (1, 2))) > 1
    with pytest.raises(ValueError, match="clusters"):
        EmbeddingInitializer(2).from_clusters(rows, 91)


def test_principal_components_match_the_singular_vectors():
    rows = np.random.default_rng(6).standard_normal((200, 12)) * np.arange(1, 13)
    first = EmbeddingInitializer(4).from_features(rows)
    centred = rows - rows.mean(0)
    directions = np.linalg.svd(centred, full_matrices=False)[2][:4]
    directions *= np.sign(directions[np.arange(4), np.abs(directions).argmax(1)])[:, None]
    assert np.allclose(first, centred @ directions.T, atol=1e-4)
    same = EmbeddingInitializer(12).from_features(rows, "identity")
    assert np.array_equal(same, rows.astype(np.float32))
    random = EmbeddingInitializer(5, seed=2).from_features(rows, "random")
    assert np.array_equal(random, EmbeddingInitializer(5, seed=2).from_features(rows, "random"))
    for method, dim in (("identity", 4), ("pca", 13), ("magic", 4)):
        with pytest.raises(ValueError):
            EmbeddingInitializer(dim).from_features(rows, method)


def test_rows_trained_before_are_found_by_id(governor, tmp_path):
    rows = torch.randn(30, 4)
    with TrainableEmbeddingManager(range(30), 4, chunk_size=7) as manager:
        manager.update_embeddings(range(30), rows)
        manager.save_final_embeddings(tmp_path / "saved")
    found = EmbeddingInitializer(4).from_pretrained(tmp_path / "saved", [29, 3, 3])
    assert np.array_equal(found, rows[[29, 3, 3]])
    with pytest.raises(KeyError, match="30"):
        EmbeddingInitializer(4).from_pretrained(tmp_path / "saved", [30])


@pytest.mark.parametrize("strategy", ["imgtxt", "txt", "img", "imgtxt_pca", "txt_pca", "img_pca"])
def test_rows_from_features_do_not_depend_on_order_or_chunks(governor, tmp_path, strategy):
    random = np.random.default_rng(9)
    ids = [int(one) for one in random.permutation(9000)[:5000]]
    images, texts = random.standard_normal((2, 5000, 8)).astype(np.float32)

    def begin(name, order, size):
        with FeatureManager(tmp_path / f"{name}f") as features:
            for chunk in range(0, 5000, size):
                at = order[chunk:chunk + size]
                features.add_features_chunk(chunk // size, images[at], texts[at], None,
                                            [ids[one] for one in at])
            with TrainableEmbeddingManager(
                    [ids[one] for one in order], 3, storage_mode="disk", factor=0.5, seed=2,
                    embeddings_dir=tmp_path / f"{name}e", initialization_strategy=strategy,
                    feature_manager=features) as manager:
                return np.asarray(manager.get_embeddings(ids))

    rows = begin("a", np.arange(5000), 1000)
    assert np.array_equal(rows, begin("b", random.permutation(5000), 1700))
    source = {"imgtxt": images - texts, "txt": texts, "img": images}[strategy.removesuffix("_pca")]
    if strategy.endswith("_pca"):
        assert np.allclose(rows.mean(0), 0, atol=1e-4) and np.allclose(rows.std(0), 0.5, rtol=1e-4)
        assert np.allclose(np.corrcoef(rows.T), np.eye(3), atol=1e-4)
    else:
        solved = np.linalg.lstsq(source.astype(np.float64), rows, rcond=None)
        assert np.allclose(source @ solved[0], rows, atol=1e-5)  # Linear in the features.
        assert 0.5 * 0.5 < rows.std() / source.std() < 0.5 * 2


def test_rows_from_clusters_of_a_stream_do_not_depend_on_order(governor, tmp_path, monkeypatch):
    monkeypatch.setattr("plimsoll.compat._initial.SAMPLE", 300)  # Of 900 samples, in blocks of 128.
    monkeypatch.setattr("plimsoll.compat._initial.BLOCK", 128)
    random = np.random.default_rng(4)
    label = random.integers(0, 4, 900)
    texts = (random.standard_normal((4, 8))[label] * 10
             + random.standard_normal((900, 8)) * 0.1).astype(np.float32)
    ids = random.permutation(5000)[:900]

    def begin(name, order, strategy):
        with FeatureManager(tmp_path / f"{name}f") as features:
            features.add_features_chunk(0, texts[order], texts[order], None, ids[order])
            with TrainableEmbeddingManager(
                    ids[order], 3, embeddings_dir=tmp_path / f"{name}e", seed=5,
                    initialization_strategy=strategy, feature_manager=features) as manager:
                return np.asarray(manager.get_embeddings(ids))

    rows = begin("a", np.arange(900), "txt_clusters_4")
    assert np.array_equal(rows, begin("b", random.permutation(900), "txt_clusters_4"))
    assert len(np.unique(rows, axis=0)) == 4
    for group in range(4):  # Samples of a group begin at one point, and none of another's.
        assert len(np.unique(rows[label == group], axis=0)) == 1
    assert len(np.unique(begin("c", np.arange(900), "img_clusters_2"), axis=0)) == 2
    with pytest.raises(ValueError, match="999 clusters of 300 samples"):
        begin("d", np.arange(900), "txt_clusters_999")
    with pytest.raises(ValueError, match="txt_clusters_K"):
        begin("e", np.arange(900), "txt_clusters_0")


def test_initialising_again_from_features_sets_every_row(governor, tmp_path):
    random = np.random.default_rng(10)
    images, texts = random.standard_normal((2, 200, 8)).astype(np.float32)
    with FeatureManager(tmp_path / "f") as features:
        features.add_features_chunk(0, images, texts, None, range(200))
        options = {"storage_mode": "disk", "embeddings_dir": tmp_path / "e",
                   "feature_manager": features}
        with TrainableEmbeddingManager(range(200), 4, **options) as manager:
            begin = manager.get_embeddings(range(200))
            manager.initialize_embeddings_imgtxt(factor=2.0)
            rows = manager.get_embeddings(range(200))
            assert (rows != begin).all()
        with TrainableEmbeddingManager(range(200), 4, initialization_strategy="imgtxt", factor=2.0,
                                       **options) as manager:
            assert torch.equal(manager.get_embeddings(range(200)), rows)
        with pytest.raises(ValueError, match="initialization_strategy is 'imgtxt'"):
            TrainableEmbeddingManager(range(200), 4, **options)

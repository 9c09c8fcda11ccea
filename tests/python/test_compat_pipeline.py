# SPDX-License-Identifier: Apache-2.0
"""compute_batch_size() and the callbacks of programs that Plimsoll replaces."""
import types

import pytest

import plimsoll
from plimsoll import compat

torch = pytest.importorskip("torch")


class Gnn(torch.nn.Module):
    """A message a node from its neighbours, twice, and a score a graph."""

    def __init__(self):
        super().__init__()
        self.ids = torch.nn.Embedding(500, 16)
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 2)
        self.norm = torch.nn.BatchNorm1d(64)

    def forward(self, graphs):
        here, there = graphs.edge_index
        assert len(graphs.batch) == len(graphs.x) == graphs.num_nodes and int(there.max()) < len(graphs.x)
        rows = self.norm(self.first(self.ids(graphs.x)))
        rows = torch.zeros_like(rows).index_add(0, there, rows[here]).relu()
        return torch.zeros(graphs.num_graphs, 64).index_add(0, graphs.batch, rows) @ self.second.weight.T


def graph(nodes=200, edges=900):
    return types.SimpleNamespace(x=torch.arange(nodes) % 500, edge_index=torch.randint(0, nodes, (2, edges)),
                                 edge_attr=torch.rand(edges, 11), y=torch.tensor([1]))


@pytest.mark.parametrize("mode", ["static", "measured"])
def test_s46_a_batch_of_graphs_is_as_large_as_memory_and_the_bound_allow(governor, mode):
    torch.manual_seed(0)
    model, sample = Gnn(), graph()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.Adam(model.parameters())
    random = torch.random.get_rng_state()
    budget = compat.compute_batch_size(model, sample, "cpu", mode, 0.7, max_batch_size=48, optimizer=optimizer)
    assert budget.recommended_batch_size == 48 and budget.estimation_mode == mode
    assert 0.01 < budget.per_graph_mb < 5 and budget.embedding_mb == pytest.approx(500 * 16 * 4 / 2**20, rel=0.1)
    assert budget.target_utilization == 0.7 and str(budget).startswith("MemoryBudget(total=")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random, torch.random.get_rng_state())
    share = 0.7 * 64 / budget.available_for_data_mb  # 64 MiB, whatever the tests before this one still hold.
    small = compat.compute_batch_size(model, sample, mode=mode, target_utilization=share, optimizer=optimizer,
                                      max_batch_size=4096)
    assert 1 <= small.recommended_batch_size < 4096


def test_s46_rows_without_edges_and_wrong_arguments(governor):
    net = torch.nn.Linear(8, 4)
    for sample in (torch.rand(1, 8), (torch.rand(1, 8),), {"input": torch.rand(1, 8)}):
        assert compat.compute_batch_size(net, sample, mode="static", max_batch_size=7).recommended_batch_size == 7
    for wrong, text in (({"mode": "binsearch"}, "mode: 'binsearch'"), ({"target_utilization": 0}, "target_utilization"),
                        ({"min_batch_size": 9, "max_batch_size": 3}, "from 9 to 3")):
        with pytest.raises(ValueError, match=text):
            compat.compute_batch_size(net, torch.rand(1, 8), **wrong)
    with pytest.raises(ValueError, match="a int has no x and edge_index"):
        compat.compute_batch_size(net, 3, mode="static")
    with pytest.raises(AttributeError, match="MemoryNothing"):
        compat.MemoryNothing


def test_s46_memory_is_logged_after_epochs(governor, tmp_path, capsys):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            return self.net(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    logger = CSVLogger(tmp_path)
    lightning.Trainer(callbacks=[compat.MemoryMonitorCallback(predicted_peak_mb=1)], max_epochs=2, logger=logger,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
                      default_root_dir=tmp_path).fit(Module(), torch.utils.data.DataLoader(torch.rand(6, 4)))
    logger.save()
    out = capsys.readouterr().out
    assert "Memory usage after epoch 0: " in out and "Memory usage after epoch 1: " in out
    assert "more than the 1 MB predicted" in out
    assert "memory/held_mb" in next(tmp_path.glob("**/metrics.csv")).read_text()


def test_s43_s44_the_originals_callbacks_are_there(governor):
    pytest.importorskip("transformers")
    from plimsoll.integrations.transformers import CleanUpCallback, WatchCallback
    assert isinstance(compat.MemoryCleanupCallback(cleanup_every_n_steps=5), CleanUpCallback)
    assert isinstance(compat.create_memory_logging_callback(), WatchCallback)
    assert plimsoll.Governor.current() is governor

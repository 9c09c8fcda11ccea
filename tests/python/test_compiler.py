# SPDX-License-Identifier: Apache-2.0
"""The compiler of torch comes when something is compiled: each test is a process of its own."""
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("plimsoll._torch")

BEGIN = """
import inspect
import sys
import torch
from torch.utils.checkpoint import checkpoint
from plimsoll.core import _compiler
_compiler.import_when_used()

def step(model, optimizer, x):
    optimizer.zero_grad()
    made = checkpoint(model, x, use_reentrant=False)
    made.backward(torch.ones_like(made))
    optimizer.step()
    return [one.detach().clone() for one in model.parameters()]

def begun():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

x = torch.linspace(-1, 1, 6).reshape(2, 3)
made = step(*begun(), x)
inspect.getmodule(sys._getframe())  # Asks every module for its file.
assert "sympy" not in sys.modules and not hasattr(torch.fx.experimental.symbolic_shapes, "__path__")
"""


def run(code):
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_steps_checkpoints_and_gradients_have_the_same_bits_with_it():
    run("""
torch._dynamo.reset()
assert "sympy" in sys.modules and type(sys.modules["torch._dynamo"]).__name__ == "module"
assert all(map(torch.equal, made, step(*begun(), x)))
""")


@pytest.mark.parametrize("first", ["torch.compile(model, backend='eager')(x)", "from torch._dynamo.utils import counters\nfrom torch._dynamo import output_graph\nassert counters is output_graph.counters",
                                   "torch._dynamo.config.suppress_errors = True"])
def test_whatever_uses_it_first_imports_it_and_compiles(first):
    """A function that was called before it came is skipped as one that was not."""
    run(f"""
model, optimizer = begun()
skipped = torch.optim.Optimizer.zero_grad.__wrapped__
assert skipped.__dynamo_disable is skipped
{first}
assert "sympy" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"] and torch._dynamo.__path__
assert getattr(skipped, "__dynamo_disable", None) is not skipped
compiled = torch.compile(lambda x: model(x) * 2, backend="eager", fullgraph=True)
assert torch.equal(compiled(x), model(x) * 2) and torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
assert all(map(torch.equal, made, step(*begun(), x)))
assert getattr(skipped, "__dynamo_disable") is not skipped
import torch._dynamo.config as settings
assert settings.suppress_errors is {"suppress_errors" in first}
""")


def test_shapes_are_compared_as_before():
    run("""
weight = torch.ones(3, requires_grad=True)
for wrong in (torch.ones(2), torch.ones(1, 3), torch.ones(3, 3)):
    try:
        torch.autograd.grad(weight * 2, weight, wrong)
    except RuntimeError as error:
        assert "Mismatch in shape" in str(error), error
    else:
        raise AssertionError(wrong.shape)
assert torch.equal(torch.autograd.grad(weight * 2, weight, torch.ones(3))[0], torch.full((3,), 2.0))
assert "sympy" not in sys.modules
""")


def test_a_compiler_that_is_there_stays():
    done = subprocess.run([sys.executable, "-c", "import sys, torch._dynamo as there\nfrom plimsoll.core import _compiler\n"
                           "_compiler.import_when_used()\nassert sys.modules['torch._dynamo'] is there"], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("recipe", ["cosir", "can-kd"])
def test_a_recipe_compiles_nothing(recipe, tmp_path, small_data):
    """Neither in its plan, its training and its evaluation."""
    from tests.support.can_traffic import write_traffic

    data = small_data
    if recipe == "can-kd":
        write_traffic(tmp_path / "train_traffic.csv", 0, 60 * 50 + 1, 250)
        data = tmp_path / "graphs"
    words = ["--memory-limit", "2GiB", *(["--config", "small", "--max-epochs", "1", "--stage", "normal", "--gradient-checkpointing", "true"]
                                         if recipe == "can-kd" else ["--epochs", "1", "--batch-size", "256", "--eval-pairs", "40"])]
    code = f"""
import sys
from plimsoll.cli._program import main
if {recipe == "can-kd"}:
    assert main(["import", "can", {str(tmp_path / "train_traffic.csv")!r}, "--window", "50", "--stride", "50", "--out", {str(data)!r}]) == 0
for command in (["plan", {recipe!r}, "--data", {str(data)!r}, *{words[:4]!r}], ["train", {recipe!r}, "--data", {str(data)!r}, "--out", {str(tmp_path / "run")!r}, *{words!r}],
                ["eval", {str(tmp_path / "run")!r}]):
    assert main(command) == 0
    assert "sympy" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

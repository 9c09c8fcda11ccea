# SPDX-License-Identifier: Apache-2.0
"""Training on a CUDA device: the process is Plimsoll's, the device torch's. Skipped where there is none."""
import pathlib

import pytest

import plimsoll
from tests.support.lives import told

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

from test_cross_entropy import CASES, made, plain

SUPPORT = pathlib.Path(__file__).resolve().parents[1] / "support"
LIMIT = "16GiB"  # A device's context and libraries take some of the host's, too.


@pytest.mark.parametrize("workers", [0, 2])
def test_killed_at_any_moment_a_run_on_a_device_ends_in_the_same_bits(workers, tmp_path):
    seen = told(SUPPORT / "run_programs.py", tmp_path, 5, 3 + workers, "on_device", workers, LIMIT)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


def test_killed_at_any_moment_a_trainer_on_a_device_ends_in_the_same_bits(tmp_path):
    pytest.importorskip("transformers")
    seen = told(SUPPORT / "trainer_programs.py", tmp_path, 3, 5, "hugging_face_on_device", 0, LIMIT)
    assert seen["digest"] == seen["undisturbed"] and seen["killed_at"]


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_the_chunked_loss_and_its_gradients_are_those_of_torch_in_float64(options, dtype, close):
    options = dict(options)
    *values, labels = made(dtype, bias=options.pop("bias", False))
    hidden, weight, bias = (None if one is None else one.detach().cuda().requires_grad_() for one in values)
    loss = plimsoll.linear_cross_entropy(hidden, weight, labels.cuda(), bias=bias, **options)
    loss.backward()
    for got, true in zip((loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad),
                         plain(*values, labels, torch.float64, **options)):
        if true is not None:
            assert (got.cpu().double() - true).norm() <= close * true.norm()


@pytest.fixture
def roomy():
    with plimsoll.Governor("32GiB", foreign_bytes="4GiB") as one:
        yield one


def layers(device):
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.LayerNorm(2048),
                                torch.nn.Linear(2048, 512)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def step_of(model, optimizer, device):
    def step(rows):
        x = torch.zeros(rows, 512, device=device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return step


def test_a_plan_bounds_what_a_real_device_reserves(roomy):
    """The step was traced on the CPU alone."""
    model, optimizer = layers("cpu")
    limit = 512 << 20
    plan = plimsoll.plan_batch(step_of(model, optimizer, "cpu"), model=model, optimizer=optimizer, governor=roomy,
                               available="2GiB", device="cuda", device_memory_limit=limit)
    model, optimizer = layers("cuda")
    # The libraries' workspaces, which plans leave out, are made by a first product and are not of the step.
    torch.zeros(8, 8, device="cuda").requires_grad_().matmul(torch.zeros(8, 8, device="cuda")).sum().backward()
    workspaces = torch.cuda.memory_allocated() - sum(p.numel() * 4 for p in model.parameters())
    step = step_of(model, optimizer, "cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step(plan.batch_size)
    reserved = torch.cuda.max_memory_reserved() - workspaces
    print(f"batch {plan.batch_size}: {reserved} B reserved, {workspaces} B of workspaces, {plan.device['reserved_bytes']} B "
          f"replayed, {plan.device['bound_bytes']} B with room for kernels, of {limit} B")
    assert plan.device["name"] == "cuda:0"
    assert 0.9 * plan.device["reserved_bytes"] < reserved <= plan.device["bound_bytes"] <= limit


def test_what_streams_is_on_the_cpu(roomy):
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2)).requires_grad_(False).cuda()
    with pytest.raises(ValueError, match="blocks.0.weight is on cuda:0; weights stream to the CPU alone"):
        plimsoll.stream_frozen(model, weights="streamed")

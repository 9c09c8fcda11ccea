# SPDX-License-Identifier: Apache-2.0
"""plimsoll.linear_cross_entropy: torch's loss and gradients, without the logits."""
import gc

import pytest

torch = pytest.importorskip("torch")

import plimsoll

CASES = [{}, {"bias": True}, {"label_smoothing": 0.1}, {"reduction": "sum", "chunk": 7},
         {"bias": True, "label_smoothing": 0.3, "reduction": "sum", "chunk": 1}, {"chunk": 1000}]


def made(dtype, tokens=50, vocabulary=31, features=12, bias=False, seed=1):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, tokens // 2, features, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, features, generator=generator, dtype=torch.float64)
    offset = torch.randn(vocabulary, generator=generator, dtype=torch.float64) if bias else None
    labels = torch.randint(vocabulary, (2, tokens // 2), generator=generator)
    labels[:, ::5] = -100
    values = [None if one is None else one.to(dtype).requires_grad_() for one in (hidden, weight, offset)]
    return *values, labels


def plain(hidden, weight, bias, labels, kind, **options):
    """Torch's own, of the same values in `kind`."""
    hidden, weight, bias = (None if one is None else one.detach().to(kind).requires_grad_() for one in (hidden, weight, bias))
    options.pop("chunk", None)
    loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias).flatten(0, -2),
                                             labels.flatten(), **options)
    loss.backward()
    return loss.detach(), *(None if one is None else one.grad for one in (hidden, weight, bias))


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("dtype, close", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_loss_and_gradients_are_those_of_torch_in_float64(options, dtype, close):
    options = dict(options)
    hidden, weight, bias, labels = made(dtype, bias=options.pop("bias", False))
    loss = plimsoll.linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and loss.shape == ()
    for got, true in zip((loss.detach(), hidden.grad, weight.grad, None if bias is None else bias.grad),
                         plain(hidden, weight, bias, labels, torch.float64, **options)):
        if true is not None:
            assert (got.double() - true).norm() <= close * true.norm()


def test_gradients_agree_with_finite_differences():
    hidden, weight, bias, labels = made(torch.float64, tokens=12, vocabulary=9, features=4, bias=True)
    assert torch.autograd.gradcheck(
        lambda *args: 3 * plimsoll.linear_cross_entropy(*args[:2], labels, bias=args[2], chunk=4, label_smoothing=0.2),
        (hidden, weight, bias))


def test_a_frozen_head_gets_no_gradient_and_the_hidden_states_get_the_same():
    hidden, weight, _, labels = made(torch.float32)
    plimsoll.linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    again = hidden.detach().clone().requires_grad_()
    plimsoll.linear_cross_entropy(again, weight.detach(), labels, chunk=16).backward()
    assert torch.equal(again.grad, hidden.grad) and weight.grad is not None


def test_without_gradients_the_loss_is_the_same_bits():
    hidden, weight, _, labels = made(torch.float32)
    with torch.no_grad():
        loss = plimsoll.linear_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    assert torch.equal(loss, plimsoll.linear_cross_entropy(hidden, weight, labels).detach())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_nothing_is_trained_loss_and_gradients_are_zero(reduction):
    hidden, weight, _, labels = made(torch.bfloat16)
    loss = plimsoll.linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), reduction=reduction)
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_labels_that_are_ignored_may_have_any_hidden_state():
    hidden, weight, _, labels = made(torch.float32)
    spoilt = hidden.detach().clone()
    spoilt[labels == -100] = float("nan")
    spoilt.requires_grad_()
    plimsoll.linear_cross_entropy(hidden, weight.detach(), labels).backward()
    plimsoll.linear_cross_entropy(spoilt, weight.detach(), labels).backward()
    assert torch.equal(spoilt.grad, hidden.grad)


def test_a_graph_that_is_kept_gives_its_gradients_twice():
    hidden, weight, _, labels = made(torch.float32)
    loss = plimsoll.linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), 2 * torch.ones(()))
    assert all(torch.equal(2 * one, two) for one, two in zip(first, second))


def test_under_autocast_it_computes_what_linear_would():
    hidden, weight, _, labels = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = plimsoll.linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    narrow = plimsoll.linear_cross_entropy(hidden.detach().bfloat16(), weight.detach().bfloat16(), labels)
    assert torch.equal(loss.detach(), narrow) and hidden.grad.dtype == torch.float32


def test_a_step_that_memory_refuses_is_made_again_with_the_same_bits(tmp_path):
    from plimsoll.core import _torch_gate

    def run(refused, folder):
        torch.manual_seed(3)
        with plimsoll.Run(folder, memory_limit="4GiB", compute_threads=1) as run:
            model, head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 301)
            optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.01)
            run.track(model=model, head=head, optimizer=optimizer)

            def loss(x, y):
                if refused and run.steps_made == 1 and run._steps._made[""][0].refusals == 0:
                    _torch_gate.load().refuse(12, 1)
                return plimsoll.linear_cross_entropy(model(x).tanh(), head.weight, y, bias=head.bias, chunk=8)

            batches = [(torch.randn(64, 8), torch.randint(301, (64,))) for _ in range(3)]
            losses = [run.step(loss, batch) for batch in run.steps(batches, progress=False)]
            return losses, head.weight.detach().clone(), run._steps._made[""][0].refusals

    undisturbed, again = run(False, tmp_path / "a"), run(True, tmp_path / "b")
    assert again[2] == 1 and undisturbed[2] == 0
    assert undisturbed[0] == again[0] and torch.equal(undisturbed[1], again[1])


def test_products_have_few_shapes_however_many_tokens_are_trained_on():
    """Of each in bfloat16 oneDNN keeps code: 0.3 to 1.3 MB, of which no limit knows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            if f.__name__.startswith(("mm.", "addmm")):
                shapes.add((f.__name__, *(tuple(one.shape) for one in args)))
            return f(*args, **(kwargs or {}))

    shapes = set()
    hidden, weight, _, labels = made(torch.bfloat16, tokens=600)
    for count in range(1, 300):
        some = labels.clone().flatten()
        some[count:] = -100
        with Products():
            plimsoll.linear_cross_entropy(hidden, weight, some.view_as(labels), chunk=128).backward()
    assert shapes and len(shapes) == 3 * 16  # Logits, and both gradients.


def test_the_logits_are_never_there():
    """Of 1,024 tokens × 20,000 words, 78 MiB in float32, the arena sees a chunk's."""
    from plimsoll.core import _torch_gate

    with plimsoll.Governor("3GiB", foreign_bytes="256MiB"):
        extension = _torch_gate.load()
        hidden, weight, _, labels = made(torch.float32, tokens=1024, vocabulary=20_000, features=16)
        gc.collect()  # What was left by other tests and would be freed within.
        before = extension.arena_stats()["live_bytes"]
        extension.reset_peak()
        plimsoll.linear_cross_entropy(hidden, weight.detach(), labels, chunk=64).backward()
        peak = extension.arena_stats()["live_peak_bytes"] - before
    assert 64 * 20_000 * 4 <= peak < 1.2 * 64 * 20_000 * 4


@pytest.mark.parametrize("trained, most", [(False, 64 * 20_000 * 2 + (4 << 20)), (True, 64 * 20_000 * 6 + 2 * 20_000 * 16 * 4)])
def test_in_bfloat16_a_few_tokens_at_a_time_are_widened(trained, most):
    """Beside what torch's own products of the chunk take, which differs by processor."""
    from plimsoll.core import _torch_gate

    with plimsoll.Governor("3GiB", foreign_bytes="256MiB"):
        extension = _torch_gate.load()
        hidden, weight, _, labels = made(torch.bfloat16, tokens=1024, vocabulary=20_000, features=16)

        def peak(run):
            before = extension.arena_stats()["live_bytes"]
            extension.reset_peak()
            run()
            return extension.arena_stats()["live_peak_bytes"] - before

        chunk, states = torch.ones(64, 20_000, dtype=torch.bfloat16), torch.ones(64, 16, dtype=torch.bfloat16)
        logits = torch.empty_like(chunk)
        product = max(peak(lambda: chunk @ weight.detach()),
                      peak(lambda: torch.mm(states, weight.detach().t(), out=logits)))
        taken = peak(lambda: plimsoll.linear_cross_entropy(hidden, weight.requires_grad_(trained), labels, chunk=64).backward())
    assert 64 * 20_000 * 2 <= taken < 1.1 * most + product


def test_a_token_that_is_certain_has_its_small_gradient():
    """Its probability is 1 in bfloat16, and what is left of it is not 0."""
    hidden = torch.tensor([[8.0, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.bfloat16)
    plimsoll.linear_cross_entropy(hidden, weight, torch.tensor([0])).backward()
    rest = 1 - 1 / (1 + torch.exp(torch.tensor(-8.0)))
    assert torch.allclose(hidden.grad.float(), torch.tensor([[-rest, rest]]), rtol=0.01)


@pytest.mark.parametrize("change, text", [
    ({"labels": 99}, "labels: 99 at place 3 is neither from 0 to 30 nor ignore_index, -100"),
    ({"chunk": 0}, "chunk: 0 tokens; it is 1 or more"),
    ({"label_smoothing": 1.5}, "label_smoothing: 1.5 is not from 0 to 1"),
    ({"reduction": "none"}, "reduction: 'none' is none of 'mean', 'sum'"),
    ({"bias": torch.zeros(3)}, "bias: [3] is not [31], one for each row of weight"),
    ({"weight": torch.zeros(31, 5)}, "weight: torch.float32 [31, 5] does not fit hidden, torch.float32 [2, 25, 12]: "
                                     "it is [vocabulary, features] of the same dtype"),
    ({"hidden": torch.zeros(2, 25, 12).half()}, "hidden: torch.float16 is none of float32, bfloat16 and float64"),
])
def test_errors_name_the_argument(change, text):
    hidden, weight, _, labels = made(torch.float32)
    if "labels" in change:
        labels[0, 3] = change["labels"]
    arguments = {"hidden": hidden, "weight": weight, **change, "labels": labels}
    with pytest.raises(ValueError) as caught:
        plimsoll.linear_cross_entropy(**arguments)
    assert str(caught.value) == text

# SPDX-License-Identifier: Apache-2.0
"""Checks of one case of plimsoll.kernels: its formula, its gradients, its bits, and what torch.library asks of an operator."""
from __future__ import annotations

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from plimsoll import kernels
from tests.support.kernel_cases import Case, forward_and_backward, gap, listed, trained_of


def same(one, other):
    """Whether results and gradients are equal, bit for bit."""
    for x, y in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
        assert torch.equal(x, y)


def float32_equals_the_formula_in_float64(case: Case):
    for rows in case.rows:
        results, gradients = forward_and_backward(case.operator, case.arguments(rows))
        exact, exact_gradients = forward_and_backward(case.formula, case.arguments(rows, torch.float64))
        for number, (x, y) in enumerate(zip(results, exact, strict=True)):
            assert gap(x, y) < case.tolerance, f"result {number} of {rows} rows"
        for number, (x, y) in enumerate(zip(gradients, exact_gradients, strict=True)):
            assert gap(x, y) < case.grad_tolerance, f"gradient {number} of {rows} rows"


def float64_is_composed_and_equals_the_formula(case: Case):
    for rows in case.rows:
        mine = forward_and_backward(case.operator, case.arguments(rows, torch.float64))
        plain = forward_and_backward(case.formula, case.arguments(rows, torch.float64))
        for x, y in zip([*mine[0], *mine[1]], [*plain[0], *plain[1]], strict=True):
            assert x.dtype == y.dtype and gap(x, y) < 1e-12


def gradients_of_float64_pass_gradcheck(case: Case):
    arguments = case.arguments(4, torch.float64)
    places = [place for place, one in enumerate(arguments) if isinstance(one, list) and one[0].is_floating_point()]
    fixed = {place: one for place, one in enumerate(arguments) if isinstance(one, list) and place not in places}

    def function(*given):  # gradcheck takes tensors and numbers: layers come one by one, and edges not at all.
        rest = list(given)
        every = [fixed[place] if place in fixed else [rest.pop(0) for _ in one] if place in places else rest.pop(0)
                 for place, one in enumerate(arguments)]
        return case.operator(*every)

    plain = tuple(each for place, one in enumerate(arguments) if place not in fixed for each in (one if place in places else [one]))
    # Fast mode takes each result for one with a gradient; the cosines of a list that is None have none.
    assert torch.autograd.gradcheck(function, plain, fast_mode=case.name != "displacement_cosines")


def bits_do_not_depend_on_the_number_of_threads(case: Case, rows: int = 1100):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            found.append(forward_and_backward(case.operator, case.arguments(rows)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        same(found[0], other)


def compile_sees_no_break_and_keeps_the_bits(case: Case):
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(lambda *arguments: getattr(kernels, case.name)(*arguments, **case.options), fullgraph=True, dynamic=True,
                             backend=aot_autograd(fw_compiler=keep))
    for rows in (33, 150):
        given = case.arguments(rows)
        mine = forward_and_backward(compiled, given[:len(given) - len(case.options)])
        same(mine, forward_and_backward(case.operator, case.arguments(rows)))
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}
    assert any(name.startswith("plimsoll.") for name in names), names
    torch._dynamo.reset()


def arguments_may_be_parts_of_larger_tensors(case: Case):
    apart = []
    for one in case.arguments(33):
        if isinstance(one, torch.Tensor):
            wide = torch.stack([one.detach(), one.detach()], -1)
            one = wide[..., 0].requires_grad_(one.requires_grad)
            assert not one.is_contiguous()
        apart.append(one)
    same(forward_and_backward(case.operator, apart), forward_and_backward(case.operator, case.arguments(33)))


def a_gradient_of_the_gradient_is_refused(case: Case, raises):
    arguments = case.arguments(5)
    inputs = trained_of(arguments)
    with raises:
        total = sum(one.square().sum() for one in listed(case.operator(*arguments)) if one.requires_grad)
        first = torch.autograd.grad(total, inputs, create_graph=True)
        torch.autograd.grad(sum(one.square().sum() for one in first), inputs)


def wrong_arguments_are_refused(function, arguments, raises):
    """Also where a gradient is asked for."""
    with raises():
        function(*arguments)
    with raises():
        function(*(one.clone().requires_grad_() if isinstance(one, torch.Tensor) and one.is_floating_point() else one for one in arguments))


def checkpointing_keeps_the_gradients(case: Case):
    """torch.utils.checkpoint computes the operator again as its backward asks for what it had saved."""
    def again(*arguments):
        return checkpoint(case.operator, *arguments, use_reentrant=False)

    same(forward_and_backward(again, case.arguments(50)), forward_and_backward(case.operator, case.arguments(50)))

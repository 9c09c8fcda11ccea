# SPDX-License-Identifier: Apache-2.0
"""Operators of plimsoll.kernels over graphs: attention, products, losses of nodes; their formulas, in value and in gradient, the
same bits for any number of threads, and what torch.library asks of an operator."""
import pytest

torch = pytest.importorskip("torch")

from tests.support.on_device import skip_without_torch

skip_without_torch()

from plimsoll import kernels
from tests.support import kernel_checks
from tests.support.kernel_cases import GRAPHS, edges_of, forward_and_backward, head_of, layer_of, made_edges, normals

CASES = [pytest.param(case, id=f"{case.name}-{number}") for number, case in enumerate(GRAPHS)]
FIRST = list({(one.values[0].name, one.values[0].trained): one for one in reversed(CASES)}.values())
TRAINED = [one for one in CASES if one.values[0].trained]
ONCE = [one for one in TRAINED if one.values[0].name not in ("mean_square", "normal_divergence")]


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_the_formula_in_float64(case):
    kernel_checks.float32_equals_the_formula_in_float64(case)


@pytest.mark.parametrize("case", CASES)
def test_float64_is_composed_and_equals_the_formula(case):
    kernel_checks.float64_is_composed_and_equals_the_formula(case)


@pytest.mark.parametrize("case", TRAINED)
def test_gradients_of_float64_pass_gradcheck(case):
    kernel_checks.gradients_of_float64_pass_gradcheck(case)


@pytest.mark.parametrize("case", CASES)
def test_bits_do_not_depend_on_the_number_of_threads(case):
    kernel_checks.bits_do_not_depend_on_the_number_of_threads(case)


@pytest.mark.parametrize("case", FIRST)
def test_torch_library_finds_no_fault(case):
    torch.library.opcheck(case.operator, tuple(case.arguments(5)))


@pytest.mark.parametrize("case", FIRST)
def test_compile_sees_no_break_and_keeps_the_bits(case):
    kernel_checks.compile_sees_no_break_and_keeps_the_bits(case)


@pytest.mark.parametrize("case", CASES)
def test_arguments_may_be_parts_of_larger_tensors(case):
    kernel_checks.arguments_may_be_parts_of_larger_tensors(case)


@pytest.mark.parametrize("case", ONCE)
def test_a_gradient_of_the_gradient_is_refused(case):
    kernel_checks.a_gradient_of_the_gradient_is_refused(case, pytest.raises(RuntimeError, match=r"not implemented|create_graph"))


def head_parts(bf16):
    return (*head_of(5), made_edges(5), bf16, True)


PARTS = {
    "_linear_rows": lambda: (normals(5, 8, seed=1).bfloat16(), normals(3, 8, seed=2).bfloat16(), normals(3, seed=3)),
    "_linear_rows_backward": lambda: (normals(5, 3, seed=1), normals(5, 8, seed=2), normals(3, 8, seed=3), True, True, False),
    "_gat_attention": lambda: (normals(5, 6, seed=1), normals(2, 3, seed=2), normals(2, 3, seed=3), normals(6, seed=4), made_edges(5), True, 0.5, 1, 2),
    "_gat_attention_backward": lambda: (normals(5, 6, seed=1), normals(5, 6, seed=2), normals(2, 3, seed=3), normals(2, 3, seed=4),
                                        normals(2, 5, 2, seed=5), normals(20, 2, seed=6), made_edges(5), True, 0.5, 1, 2),
    "_head_loss": lambda: head_parts(False),
    "_mean_square_backward": lambda: (normals(1, seed=1)[0], normals(4, 2, seed=2), normals(4, 2, seed=3)),
    "_normal_divergence_backward": lambda: (normals(1, seed=1)[0], normals(4, 2, seed=2), normals(4, 2, seed=3)),
}


@pytest.mark.parametrize("name", PARTS)
def test_torch_library_finds_no_fault_in_parts(name):
    torch.library.opcheck(getattr(torch.ops.plimsoll, name).default, PARTS[name]())


def test_no_nodes_are_none_or_refused():
    edges = kernels.sort_edges(edges_of(0), 0)
    assert [len(one) for one in edges] == [1, 0, 1, 0, 0, 0]
    layer = [one if isinstance(one, list) else one.requires_grad_() for one in layer_of(0, 7, 3, 5, True)]
    for function, arguments in ((kernels.gat_conv, layer), (kernels.linear_rows, [normals(0, 4, seed=1).requires_grad_(), normals(3, 4, seed=2)])):
        results, gradients = forward_and_backward(function, arguments)
        assert results[0].shape[0] == 0 and all(one.abs().sum() == 0 for one in gradients)
    with pytest.raises(ValueError, match="no elements"):
        kernels.mean_square(torch.ones(0, 3), torch.ones(0, 3))
    with pytest.raises(ValueError, match="no rows"):
        kernels.id_cross_entropy(*head_of(0))


def test_a_node_without_edges_gets_its_own_row():
    edges = kernels.sort_edges(torch.zeros(2, 0, dtype=torch.int64), 3)
    x, weight = normals(3, 6, seed=1), normals(8, 6, seed=2)
    y = kernels.gat_conv(x, weight, normals(2, 4, seed=3), normals(2, 4, seed=4), torch.zeros(8), edges)
    assert torch.equal(y, kernels.linear_rows(x, weight))


def test_rows_of_a_product_do_not_depend_on_the_rows_beside_them():
    x, weight, bias = normals(70, 33, seed=1), normals(9, 33, seed=2), normals(9, seed=3)
    whole = kernels.linear_rows(x, weight, bias)
    assert all(torch.equal(kernels.linear_rows(x[k:k + 1], weight, bias), whole[k:k + 1]) for k in range(70))
    own = kernels.id_cross_entropy_rows(*head_of(70))
    rows, weight, bias, ids = head_of(70)
    assert torch.equal(kernels.id_cross_entropy_rows(rows[7:], weight, bias, ids[7:]), own[7:])


def test_products_in_bfloat16_round_what_they_take_and_the_gradient():
    x, weight, grad = normals(40, 24, seed=1).requires_grad_(), normals(10, 24, seed=2).requires_grad_(), normals(40, 10, seed=3)
    y = kernels.linear_rows(x, weight, bf16=True)
    found = torch.autograd.grad(y, (x, weight), grad)
    near_x, near_weight, near_grad = (one.detach().bfloat16().double() for one in (x, weight, grad))
    for one, exact in zip((y, *found), (near_x @ near_weight.T, near_grad @ near_weight, near_grad.T @ near_x)):
        assert one.dtype == torch.float32 and (one - exact).norm() < 1e-6 * exact.norm()
    for function, arguments in ((kernels.id_cross_entropy, head_of(50)), (kernels.neighbor_cross_entropy, [*head_of(50), made_edges(50)])):
        rows, weight, *more = arguments
        narrow = function(rows, weight, *more, bf16=True)
        assert torch.allclose(narrow, function(rows.bfloat16().float(), weight.bfloat16().float(), *more), rtol=1e-6)
        assert narrow != function(rows, weight, *more)


def test_factors_of_dropout_are_a_function_of_seed_place_and_index():
    like = torch.empty(1000, 7)
    keep = kernels.dropout_factors(like, 0.25, 5, 1)
    assert keep.unique().tolist() == [0.0, pytest.approx(1 / 0.75, rel=1e-5)]
    assert abs(float((keep == 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(keep[:10], kernels.dropout_factors(like[:10], 0.25, 5, 1))
    assert torch.equal(keep.double(), kernels.dropout_factors(like.double(), 0.25, 5, 1))
    assert not torch.equal(keep, kernels.dropout_factors(like, 0.25, 6, 1)) and not torch.equal(keep, kernels.dropout_factors(like, 0.25, 5, 2))
    assert torch.equal(kernels.dropout_factors(like, 0.0, 5, 1), torch.ones(1000, 7))


ROWS, LIST = torch.ones(4, 8), torch.arange(4)


def layer(**changed):
    given = {"x": ROWS, "weight": ROWS, "att_source": ROWS[:2, :2], "att_target": ROWS[:2, :2], "bias": ROWS[0, :4], "edges": made_edges(4), **changed}
    return list(given.values())


def broken(part, value):
    edges = made_edges(4)
    edges[part] = edges[part].clone().fill_(value)
    return edges


WRONG = [
    (kernels.sort_edges, [torch.zeros(3, 2, dtype=torch.int64), 2], ValueError, r"edge_index: \[3, 2\] is not \[2, edges\]"),
    (kernels.sort_edges, [torch.zeros(2, 2), 2], TypeError, "edge_index: Float is not int64"),
    (kernels.sort_edges, [torch.tensor([[0, 1], [1, 2]]), 2], IndexError, "a node that is not from 0 to 1"),
    (kernels.gat_conv, layer(weight=ROWS[:3]), ValueError, "rows of 3 do not fit att_source"),
    (kernels.gat_conv, layer(att_target=ROWS[:2, :1]), ValueError, "att_target: .* is not the shape of att_source"),
    (kernels.gat_conv, layer(bias=ROWS[0]), ValueError, r"bias: \[8\] does not fit att_source"),
    (kernels.gat_conv, layer(edges=made_edges(4)[:5]), ValueError, "edges: 5 tensors, not the 6 of sort_edges"),
    (kernels.gat_conv, layer(edges=made_edges(5)), ValueError, "edges: of 5 nodes, but there are 4 rows"),
    (kernels.gat_conv, layer(edges=[one.long() for one in made_edges(4)]), TypeError, "edges: tensor 0 is not as sort_edges"),
    *((kernels.gat_conv, layer(edges=broken(part, value)), IndexError, "not there") for part, value in ((0, 99), (1, 4), (2, 99), (3, -1), (4, 99))),
    (kernels.dropout_factors, [ROWS, 1.0, 0, 0], ValueError, "dropout: 1 is not from 0 to below 1"),
    (kernels.linear_rows, [ROWS, ROWS[:, :3]], ValueError, r"weight: \[4, 3\] does not fit x, \[4, 8\]"),
    (kernels.linear_rows, [ROWS, ROWS.double()], TypeError, "weight: Double, but x is Float"),
    (kernels.linear_rows, [ROWS, ROWS, ROWS[0]], ValueError, r"bias: \[8\] does not fit weight"),
    (kernels.mean_square, [ROWS, ROWS[:2]], ValueError, "y: .* is not the shape of"),
    (kernels.id_cross_entropy, [ROWS, ROWS, ROWS[0, :4], LIST + 1], IndexError, "ids: 4 at place 3 is not from 0 to 3"),
    (kernels.id_cross_entropy, [ROWS, ROWS, ROWS[0, :4], LIST[:2]], ValueError, "ids: .* does not fit rows"),
    (kernels.neighbor_cross_entropy, [ROWS, ROWS, ROWS[0, :4], LIST, []], ValueError, "edges: none"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_by_name(function, arguments, error, message):
    kernel_checks.wrong_arguments_are_refused(function, arguments, lambda: pytest.raises(error, match=message))


@pytest.mark.parametrize("case", TRAINED)
def test_checkpointing_without_reentrance_keeps_the_gradients(case):
    kernel_checks.checkpointing_keeps_the_gradients(case)

# SPDX-License-Identifier: Apache-2.0
"""Operators of plimsoll.kernels row by row: norms, masks, noise, means of runs, an LSTM's step; their formulas, in value and in
gradient, the same bits for any number of threads, and what torch.library asks of an operator."""
import pytest

torch = pytest.importorskip("torch")

from tests.support.on_device import skip_without_torch

skip_without_torch()

from plimsoll import kernels
from tests.support import kernel_checks
from tests.support.kernel_cases import LAYERS, forward_and_backward, normals, normed, runs_of

CASES = [pytest.param(case, id=f"{case.name}-{number}") for number, case in enumerate(LAYERS)]
TRAINED = [one for one in CASES if one.values[0].trained]


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
    kernel_checks.bits_do_not_depend_on_the_number_of_threads(case, rows=5000)


@pytest.mark.parametrize("case", CASES)
def test_torch_library_finds_no_fault(case):
    torch.library.opcheck(case.operator, tuple(case.arguments(5)))


@pytest.mark.parametrize("case", CASES)
def test_compile_sees_no_break_and_keeps_the_bits(case):
    kernel_checks.compile_sees_no_break_and_keeps_the_bits(case)


@pytest.mark.parametrize("case", CASES)
def test_arguments_may_be_parts_of_larger_tensors(case):
    kernel_checks.arguments_may_be_parts_of_larger_tensors(case)


@pytest.mark.parametrize("case", [one for one in TRAINED if one.values[0].name != "logistic"])
def test_a_gradient_of_the_gradient_is_refused(case):
    kernel_checks.a_gradient_of_the_gradient_is_refused(case, pytest.raises(RuntimeError, match=r"not implemented|create_graph"))


def test_a_gradient_of_the_logistic_functions_gradient_is_its_own():
    x = normals(5, 3, seed=1).requires_grad_()
    first = torch.autograd.grad(kernels.logistic(x).sum(), x, create_graph=True)[0]
    other = torch.autograd.grad(torch.sigmoid(x).sum(), x, create_graph=True)[0]
    assert torch.allclose(*(torch.autograd.grad(one.square().sum(), x)[0] for one in (first, other)), atol=1e-6)


PARTS = {
    "_relu_dropout_backward": lambda: (normals(5, 8, seed=1), normals(5, 8, seed=2).relu(), 0.4),
    "_norm_relu_dropout": lambda: (*normed(5), 0.4, 1, 2),
    "_norm_relu_dropout_backward": lambda: (normals(5, 13, seed=1), normed(5)[0], normals(5, 13, seed=2).relu(), *normed(5)[3:], normed(5)[1], 0.4, True),
    "_sample_normal": lambda: (normals(5, 8, seed=1), normals(5, 8, seed=2), 1, 2),
    "_segment_mean_backward": lambda: (normals(7, 3, seed=1)[:len(runs_of(5)) - 1], runs_of(5), 5),
    "_lstm_cell": lambda: (normals(5, 8, seed=1), normals(5, 2, seed=2)),
    "_lstm_cell_backward": lambda: (normals(5, 2, seed=1), normals(5, 2, seed=2), normals(5, 8, seed=3), None, normals(5, 2, seed=4)),
    "_mix_layers": lambda: ([normals(5, 8, seed=1), normals(5, 8, seed=2)], normals(5, 2, seed=3)),
    "_mix_layers_backward": lambda: (normals(5, 8, seed=1), [normals(5, 8, seed=2), normals(5, 8, seed=3)], normals(5, 2, seed=4).softmax(1)),
}


@pytest.mark.parametrize("name", PARTS)
def test_torch_library_finds_no_fault_in_parts(name):
    torch.library.opcheck(getattr(torch.ops.plimsoll, name).default, PARTS[name]())


@pytest.mark.parametrize("case", CASES)
def test_no_rows_are_none_or_refused(case):
    if case.name == "column_moments":
        with pytest.raises(ValueError, match="has no rows"):
            case.operator(*case.arguments(0))
        return
    if case.options.get("of_batch"):
        return  # Nobody has the moments of no rows.
    results, gradients = forward_and_backward(case.operator, case.arguments(0))
    assert all(one.abs().sum() == 0 for one in [*results, *gradients])


def test_masks_and_noise_are_the_same_for_both_dtypes():
    x = normals(40, 9, seed=1).abs() + 1
    dropped = kernels.relu_dropout(x, 0.5, 3, 1) == 0
    assert 0.3 < dropped.float().mean() < 0.7 and torch.equal(dropped, kernels.relu_dropout(x.double(), 0.5, 3, 1) == 0)
    assert torch.equal(dropped, kernels.dropout_factors(x, 0.5, 3, 1) == 0)
    noise = kernels.sample_normal(torch.zeros(9000), torch.zeros(9000), 3, 1)
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    assert torch.equal(noise.double(), kernels.sample_normal(torch.zeros(9000).double(), torch.zeros(9000).double(), 3, 1))


ROWS = torch.ones(4, 8)
WRONG = [
    (kernels.relu_dropout, [ROWS.half(), 0.1, 0, 0], TypeError, "x: Half is neither"),
    (kernels.relu_dropout, [ROWS, -0.1, 0, 0], ValueError, "dropout: -0.1 is not from 0"),
    (kernels.sample_normal, [ROWS, ROWS[:2], 0, 0], ValueError, "log_variance: .* is not the shape of mean"),
    (kernels.segment_mean, [ROWS, torch.tensor([0, 4])], TypeError, "ptr: Long is not int32"),
    (kernels.segment_mean, [ROWS, torch.tensor([0, 3, 1, 4]).int()], IndexError, "does not ascend from 0 to 4"),
    (kernels.segment_mean, [ROWS, torch.tensor([0, 5]).int()], IndexError, "does not ascend from 0 to 4"),
    (kernels.lstm_cell, [ROWS[:, :6]], ValueError, "gates: 6 columns, not four of each"),
    (kernels.lstm_cell, [ROWS, ROWS], ValueError, "before: .* does not fit gates"),
    (kernels.mix_layers, [[ROWS, ROWS[:2]], ROWS[:, :2]], ValueError, "layers: .* is not the shape of the first"),
    (kernels.mix_layers, [[ROWS], ROWS], ValueError, r"scores: \[4, 8\] for 1 layers"),
    (kernels.column_moments, [ROWS[0]], ValueError, "x: 1 dimensions, not 2"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_by_name(function, arguments, error, message):
    kernel_checks.wrong_arguments_are_refused(function, arguments, lambda: pytest.raises(error, match=message))


def test_a_norm_with_columns_of_another_number_is_refused():
    x, weight, bias, mean, variance = normed(4)
    with pytest.raises(ValueError, match=r"mean: \[12\] does not fit x, \[4, 13\]"):
        kernels.norm_relu_dropout(x, weight, bias, mean[1:], variance, of_batch=False)


@pytest.mark.parametrize("case", TRAINED)
def test_checkpointing_without_reentrance_keeps_the_gradients(case):
    kernel_checks.checkpointing_keeps_the_gradients(case)

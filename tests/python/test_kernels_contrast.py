# SPDX-License-Identifier: Apache-2.0
"""Operators of plimsoll.kernels over rows that are compared, and recall ranks: their formulas, in value and in gradient, the same
bits for any number of threads, and what torch.library asks of an operator."""
import pytest

torch = pytest.importorskip("torch")

from tests.support.on_device import skip_without_torch

skip_without_torch()

from plimsoll import kernels
from tests.support import kernel_checks
from tests.support.kernel_cases import CONTRAST, RECALL, forward_and_backward, normals

CASES = [pytest.param(case, id=f"{case.name}-{number}") for number, case in enumerate((*CONTRAST, *RECALL))]
FIRST = list({(one.values[0].name, one.values[0].trained): one for one in reversed(CASES)}.values())
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
    kernel_checks.bits_do_not_depend_on_the_number_of_threads(case)


@pytest.mark.parametrize("case", FIRST)
def test_torch_library_finds_no_fault(case):
    torch.library.opcheck(case.operator, tuple(case.arguments(5)))


PARTS = {
    "_normalize_rows": lambda: (normals(5, 8, seed=1),),
    "_normalize_rows_backward": lambda: (normals(5, 8, seed=1), normals(5, 8, seed=2), normals(5, seed=3).abs()),
    "_polar_coordinates_backward": lambda: (normals(5, seed=1), normals(5, seed=2), normals(5, 3, seed=3)),
    "_rotate_toward_backward": lambda: (*(normals(5, 8, seed=k) for k in range(4)), normals(5, seed=5), normals(5, seed=6), True),
    "_symmetric_info_nce": lambda: (normals(5, 8, seed=1, scale=0.1), normals(5, 8, seed=2, scale=0.1), torch.arange(5), 0.1, True, False),
    "_displacement_cosines_backward": lambda: (*(normals(5, seed=k) for k in range(3)), normals(5, 8, seed=4), normals(5, 8, seed=5),
                                               torch.arange(5).roll(1), None, *(normals(5, seed=k).abs() for k in range(3))),
}


@pytest.mark.parametrize("name", PARTS)
def test_torch_library_finds_no_fault_in_parts(name):
    torch.library.opcheck(getattr(torch.ops.plimsoll, name).default, PARTS[name]())


@pytest.mark.parametrize("case", FIRST)
def test_compile_sees_no_break_and_keeps_the_bits(case):
    kernel_checks.compile_sees_no_break_and_keeps_the_bits(case)


@pytest.mark.parametrize("case", CASES)
def test_arguments_may_be_parts_of_larger_tensors(case):
    kernel_checks.arguments_may_be_parts_of_larger_tensors(case)


@pytest.mark.parametrize("case", CASES)
def test_no_rows_are_none_or_refused(case):
    if case.name in ("symmetric_info_nce", "nearest_neighbors"):
        with pytest.raises(ValueError, match="fewer than two rows"):
            case.operator(*case.arguments(1))
        return
    results, gradients = forward_and_backward(case.operator, case.arguments(0))
    assert all(one.numel() == 0 for one in [*results, *gradients])


def test_zeros_have_finite_results_and_gradients():
    zeros, one = torch.zeros(3, 16), torch.ones(3)
    for dtype in (torch.float32, torch.float64):
        for function, arguments in ((kernels.normalize_rows, [zeros]), (kernels.polar_coordinates, [zeros]), (kernels.polar_coordinates, [zeros[:, :2]]),
                                    (kernels.rotate_toward, [zeros, zeros, one, one]),
                                    (kernels.displacement_cosines, [zeros, zeros])):
            made = [x.to(dtype).requires_grad_() for x in arguments]
            results, gradients = forward_and_backward(function, made)
            assert all(x.isfinite().all() for x in [*results, *gradients])


def test_neighbors_of_equal_rows_are_the_lowest():
    for dtype in (torch.float32, torch.float64):
        nearest, best, _ = kernels.nearest_neighbors(torch.ones(70, 2, dtype=dtype))
        assert nearest[0].tolist() == [1, 2, 3] and nearest[69].tolist() == [0, 1, 2] and best[[0, 69]].tolist() == [1, 0]


def test_nothing_is_kept_for_what_takes_no_gradient():
    x, direction = normals(4, 8, seed=1), normals(4, 8, seed=2).requires_grad_()
    out, straight = kernels.rotate_toward(x, direction, torch.ones(4), torch.ones(4))
    assert out.requires_grad and not straight.requires_grad
    assert not any(one.requires_grad for one in kernels.nearest_neighbors(direction))
    with torch.no_grad():
        assert not kernels.normalize_rows(direction).requires_grad
    with torch.inference_mode():
        assert torch.equal(kernels.normalize_rows(direction), kernels.normalize_rows(direction.detach()))


@pytest.mark.parametrize("case", TRAINED)
def test_a_gradient_of_the_gradient_is_refused(case):
    kernel_checks.a_gradient_of_the_gradient_is_refused(case, pytest.raises(RuntimeError, match=r"not implemented|create_graph"))


ROWS, LIST = torch.ones(4, 8), torch.arange(4)
WRONG = [
    (kernels.normalize_rows, [ROWS.half()], TypeError, "x: Half is neither float32 nor float64"),
    (kernels.normalize_rows, [ROWS[0]], ValueError, "x: 1 dimensions, not 2"),
    (kernels.polar_coordinates, [ROWS[:, :0]], ValueError, "x has no columns"),
    (kernels.rotate_toward, [ROWS, ROWS[:, :3], ROWS[:, 0], ROWS[:, 0]], ValueError, r"direction: \[4, 3\] is not the shape of x, \[4, 8\]"),
    (kernels.rotate_toward, [ROWS, ROWS, ROWS[:, 0].double(), ROWS[:, 0]], TypeError, "angle: Double, but x is Float"),
    (kernels.rotate_toward, [ROWS, ROWS, ROWS[:, 0], ROWS[:3, 0]], ValueError, r"scale: \[3\] does not fit x, \[4, 8\]"),
    (kernels.symmetric_info_nce, [ROWS, ROWS[:3], LIST, 0.1], ValueError, r"b: \[3, 8\] is not the shape of a"),
    (kernels.symmetric_info_nce, [ROWS, ROWS, LIST.int(), 0.1], TypeError, "groups: Int is not int64"),
    (kernels.symmetric_info_nce, [ROWS, ROWS, LIST[:3], 0.1], ValueError, r"groups: \[3\] does not fit a, \[4, 8\]"),
    (kernels.symmetric_info_nce, [ROWS, ROWS, LIST, 0.02], ValueError, "temperature 0.02 is below 0.025"),
    (kernels.nearest_neighbors, [ROWS.int()], TypeError, "x: Int is neither"),
    (kernels.displacement_cosines, [ROWS, ROWS, LIST + 1], IndexError, "pairs: 4 at place 3 is not from 0 to 3"),
    (kernels.displacement_cosines, [ROWS, ROWS, None, LIST.float()], TypeError, "pairs1: Float is not int64"),
    (kernels.recall_ranks, [ROWS, LIST + 6], IndexError, "target: 8 at place 2 is not from 0 to 7"),
    (kernels.recall_ranks, [ROWS, LIST[:2]], ValueError, r"target: \[2\] does not fit similarity, \[4, 8\]"),
    (kernels.turned_query_ranks, [ROWS, ROWS[:2], ROWS[:2, :4], ROWS[:2, :3], ROWS[:, :2]], ValueError, r"b: \[2, 3\] does not fit s, \[4, 8\]"),
    (kernels.turned_gallery_ranks, [ROWS, ROWS[:, :2], ROWS[:2], ROWS[:2], ROWS[:, :3], LIST, LIST], ValueError,
     r"least: \[4, 3\] does not fit a, \[2, 8\]"),
]


@pytest.mark.parametrize(("function", "arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused_by_name(function, arguments, error, message):
    kernel_checks.wrong_arguments_are_refused(function, arguments, lambda: pytest.raises(error, match=message))


@pytest.mark.parametrize("case", TRAINED)
def test_checkpointing_without_reentrance_keeps_the_gradients(case):
    kernel_checks.checkpointing_keeps_the_gradients(case)

from __future__ import annotations

import pytest
import torch

from flexq_bench.schemes.awq import output_error
from flexq_bench.schemes.column_groups import ColumnGroup, column_groups, round_to_nearest
from flexq_bench.schemes.gptq import GptqOptions, gptq
from kernels.errors import ShapeError
from kernels.formats import NumberFormat

K = 150  # no multiple of the group of 64
FORMATS = (
    NumberFormat(4, 64),
    NumberFormat(4, None, "asymmetric"),
    NumberFormat(3, 64, "balanced"),
    NumberFormat(6, None, "float"),
    NumberFormat(5, 64, "float"),
)


def correlated(seed: int, rows: int = 24, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [rows, K], and the second moments of inputs whose channels depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, K, generator=generator)
    inputs = torch.randn(tokens, 40, generator=generator) @ torch.randn(40, K, generator=generator)
    inputs += 0.3 * torch.randn(tokens, K, generator=generator)
    return weight, (inputs.T @ inputs).double()


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: number.name)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gptq_errs_less_than_rounding_to_nearest(number, act_order, seed):
    weight, hessian = correlated(seed)
    groups = column_groups(K, number)

    solved = gptq(weight, hessian, groups, GptqOptions(act_order=act_order))

    nearest = round_to_nearest(weight, groups)
    ours, theirs = (
        output_error((weight - w).double(), hessian.double()) for w in (solved, nearest)
    )
    assert ours < 0.9 * theirs


def test_gptq_is_the_definition_with_an_inverse_that_shrinks():
    weight, hessian = correlated(0)
    number = NumberFormat(4)

    solved = gptq(weight, hessian, column_groups(K, number))

    work = weight.double()
    scaling = number.fit(work)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(K)
    inverse = torch.linalg.inv(damped)
    for j in range(K):  # equation 3 of arXiv 2210.17323, column j leaving the inverse each time
        code = number.snap(work[:, j : j + 1], scaling)
        error = (work[:, j : j + 1] - code) / inverse[0, 0]
        work[:, j + 1 :] -= error * inverse[0, 1:]
        work[:, j] = code[:, 0]
        inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    torch.testing.assert_close(solved.double(), work)


@pytest.mark.parametrize("act_order", [False, True])
def test_without_correlations_gptq_rounds_to_nearest(act_order):
    weight, _ = correlated(0)
    groups = column_groups(K, NumberFormat(4, 64))
    spread = torch.diag(torch.rand(K, dtype=torch.float64) + 0.1)

    solved = gptq(weight, spread, groups, GptqOptions(act_order=act_order))

    assert torch.equal(solved, round_to_nearest(weight, groups))


def test_size_of_blocks_changes_nothing():
    weight, hessian = correlated(0)
    groups = column_groups(K, NumberFormat(4, 64))

    small = gptq(weight, hessian, groups, GptqOptions(block=7))

    torch.testing.assert_close(small, gptq(weight, hessian, groups, GptqOptions(block=K)))


def test_columns_without_a_format_take_up_errors_and_keep_their_precision():
    weight, hessian = correlated(0)
    kept = (*column_groups(K - 30, NumberFormat(4, 64)), ColumnGroup(K - 30, K, None))

    solved = gptq(weight, hessian, kept)

    nearest = round_to_nearest(weight, kept)
    assert torch.equal(nearest[:, K - 30 :], weight[:, K - 30 :])
    ours, theirs = (
        output_error((weight - w).double(), hessian.double()) for w in (solved, nearest)
    )
    assert ours < 0.5 * theirs


def test_inputs_never_seen_are_rounded_to_nearest():
    weight, hessian = correlated(0)
    hessian[5], hessian[:, 5] = 0, 0
    groups = column_groups(K, NumberFormat(4))

    solved = gptq(weight, hessian, groups)

    assert torch.equal(solved[:, 5], round_to_nearest(weight, groups)[:, 5])


def test_hessian_that_does_not_fit_or_is_not_finite_is_refused():
    weight, hessian = correlated(0)
    groups = column_groups(K, NumberFormat(4))

    with pytest.raises(ShapeError, match="150x150 Hessian"):
        gptq(weight, hessian[:10, :10], groups)
    hessian[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        gptq(weight, hessian, groups)

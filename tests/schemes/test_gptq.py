from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, format_of, quantize
from flexq_bench.schemes.awq import output_error
from flexq_bench.schemes.gptq import GptqOptions, gptq, gptq_together

K = 150  # no multiple of the group of 64
FORMATS = (
    NumberFormat(4, 64),
    NumberFormat(4, None, "asymmetric"),
    NumberFormat(3, 64, "balanced"),
    NumberFormat(6, None, "float"),
    NumberFormat(5, 64, "float"),
)


def correlated(seed, rows=24, tokens=300):
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

    solved = gptq(weight, hessian, number, GptqOptions(act_order=act_order))

    nearest = quantize(weight, number)
    ours, theirs = (output_error(weight - w.dequantize(), hessian) for w in (solved, nearest))
    assert ours < 0.9 * theirs


def test_gptq_is_the_definition_with_an_inverse_that_shrinks():
    weight, hessian = correlated(0)
    number = NumberFormat(4)

    solved = gptq(weight, hessian, number)

    work = weight.double()
    rounder = number.rounder(number.fit(work), work.dtype)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(K)
    inverse = torch.linalg.inv(damped)
    for j in range(K):  # equation 3 of arXiv 2210.17323, column j leaving the inverse each time
        rounded = rounder.values(rounder.codes(work[:, j : j + 1]))
        error = (work[:, j : j + 1] - rounded) / inverse[0, 0]
        work[:, j + 1 :] -= error * inverse[0, 1:]
        work[:, j] = rounded[:, 0]
        inverse = inverse[1:, 1:] - torch.outer(inverse[1:, 0], inverse[0, 1:]) / inverse[0, 0]
    torch.testing.assert_close(solved.dequantize(), work)


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: number.name)
@pytest.mark.parametrize("act_order", [False, True])
def test_without_correlations_gptq_rounds_to_nearest(number, act_order):
    weight, _ = correlated(0)
    spread = torch.diag(torch.rand(K, dtype=torch.float64) + 0.1)

    solved = gptq(weight, spread, number, GptqOptions(act_order=act_order))

    nearest = quantize(weight, number)
    assert format_of(solved) == format_of(nearest)
    for name in ("values", "scales", "zero_points"):
        ours, theirs = getattr(solved, name), getattr(nearest, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


def test_weights_are_solved_together_in_channel_order():
    weight, hessian = correlated(0)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    number = NumberFormat(4, 64, "mixed")

    first, second = gptq_together([weight[:10], weight[10:]], hessian, number, order=order)

    alone = gptq(weight[:, order], hessian[order][:, order], number)
    assert torch.equal(torch.cat([first.values, second.values]), alone.values)
    assert second.order.tolist() == order.tolist()
    assert (first.rows, second.rows, first.tail_bits) == (10, 14, 8)
    assert int(first.values[:, :128].abs().max()) <= 8 < int(first.values[:, 128:].abs().max())


def test_size_of_blocks_changes_nothing():
    weight, hessian = correlated(0)
    number = NumberFormat(4, 64)

    small = gptq(weight, hessian, number, GptqOptions(block=7))

    whole = gptq(weight, hessian, number, GptqOptions(block=K))
    assert torch.equal(small.values, whole.values)


def test_inputs_without_calibration_are_rounded_to_nearest():
    weight, hessian = correlated(0)
    hessian[5], hessian[:, 5] = 0, 0
    number = NumberFormat(4)

    solved = gptq(weight, hessian, number)

    assert torch.equal(solved.values[:, 5], quantize(weight, number).values[:, 5])


def test_invalid_hessian_is_refused():
    weight, hessian = correlated(0)
    number = NumberFormat(4)

    with pytest.raises(ShapeError, match="150x150 Hessian"):
        gptq(weight, hessian[:10, :10], number)
    hessian[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        gptq(weight, hessian, number)

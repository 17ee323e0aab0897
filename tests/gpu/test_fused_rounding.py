"""The one-pass rounding of activations on a GPU against the definition on a CPU, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.formats import NumberFormat, fused

FORMATS = [
    NumberFormat(6, 128),
    NumberFormat(8, 128),
    NumberFormat(4, 32, clip=0.9),
    NumberFormat(6, 100),
    NumberFormat(8),
    NumberFormat(2, None, "balanced"),
]


@pytest.mark.parametrize("number", FORMATS, ids=lambda number: number.name)
@pytest.mark.parametrize(("rows", "k"), [(1, 64), (3, 576), (17, 1536), (2048, 300), (5, 8192)])
def test_the_numbers_are_those_of_the_definition(number, rows, k):
    generator = torch.Generator().manual_seed(rows + k)
    x = torch.randn(rows, k, generator=generator)
    x[0] = 0
    x[-1] *= 1e-7  # scales that FP16 has few bits for, or none
    x[rows // 2, ::7] *= 300
    x = x.half()
    assert torch.cuda.is_available()
    assert fused.takes(x.cuda())
    assert torch.equal(number.round(x.cuda()).cpu(), number.round(x))


def test_a_part_of_a_matrix_is_rounded_like_a_copy_of_it():
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)).half()
    number = NumberFormat(4, 128)
    assert torch.equal(number.round(x.cuda()[:, 100:400]).cpu(), number.round(x[:, 100:400]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(bad):
    x = torch.ones(4, 256, dtype=torch.float16, device="cuda")
    x[2, 200] = bad
    with pytest.raises(ValueError, match="cannot quantize NaN or infinity"):
        NumberFormat(6, 128).round(x)

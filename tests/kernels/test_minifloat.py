"""FP8, FP6 and FP5: the formats by their definition, and the layout as its kernel reads it."""

from __future__ import annotations

from functools import partial

import operands
import pytest
import torch

from flexq_bench.kernels.contract import checked_scales
from flexq_bench.kernels.cuda.weight_only.minifloat import tile_minifloats
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import (
    FLOAT_TYPES,
    NumberFormat,
    Operand,
    quantize,
)
from flexq_bench.kernels.formats.floats import USUAL_TYPES

E3M2 = [0, 1 / 16, 2 / 16, 3 / 16]  # subnormal, then 2^e · (1, 1.25, 1.5, 1.75)
E3M2 += [2.0**e * m for e in range(-2, 5) for m in (1, 1.25, 1.5, 1.75)]
E3M1 = [0, 1 / 8] + [2.0**e * m for e in range(-2, 5) for m in (1, 1.5)]
# OCP 8-bit floating point specification: exponent bias 7, and the code 15/7 is NaN.
E4M3 = [m * 2.0**-9 for m in range(8)]  # subnormal
E4M3 += [m * 2.0**e for e in range(-9, 6) for m in range(8, 16)][:-1]
# Magnitudes in order: those of even place have an even mantissa.
MAGNITUDES = {
    bits: torch.tensor(numbers, dtype=torch.float64)
    for bits, numbers in ((8, E4M3), (6, E3M2), (5, E3M1))
}


def numbers_of(bits):
    return torch.cat([MAGNITUDES[bits], -MAGNITUDES[bits]])


def quantized(matrix, bits, group=None):
    return quantize(matrix, NumberFormat(bits, group, "float"))


def numbers_by_code(bits):
    return FLOAT_TYPES[USUAL_TYPES[bits]].numbers()


def rotated_right(word, by):
    return (word >> by | word << (32 - by)) & 0xFFFFFFFF


def half_of(bits):
    return bits.to(torch.int16).view(torch.float16).double()


def operand_register(words, bits, mma, register):
    """The two weights of an A operand register, as csrc/weight_only/layout.cuh makes them.

    words: int64 [tiles, steps, words of one lane], the high plane first.
    """
    quad = 2 * mma + register % 2
    high = rotated_right(words[:, :, quad // 2], 4 * (quad % 2))
    if bits == 6:
        low = rotated_right(words[:, :, 8 + quad // 4], 2 * (quad % 4))
    else:
        low = words[:, :, 8 + quad // 8] << quad % 8
    four = high & 0x1E1E1E1E | low & (0x81818181 if bits == 6 else 0x80808080)
    pair = four if register >= 2 else four << 8
    return [half_of(pair >> 16 * half & 0xFF00) * 4096 for half in (0, 1)]


@pytest.mark.parametrize("bits", [6, 5])
def test_codes_stand_for_what_the_format_says(bits):
    assert torch.equal(numbers_by_code(bits), numbers_of(bits))
    assert float(numbers_by_code(bits).max()) == {6: 28.0, 5: 24.0}[bits]


@pytest.mark.parametrize("bits", [8, 6, 5])
def test_floats_are_nearest_with_ties_to_even(bits):
    numbers = MAGNITUDES[bits]
    ties = (numbers[1:] + numbers[:-1]) / 2
    generator = torch.Generator().manual_seed(1)
    others = torch.randn(3000, generator=generator).double() * numbers[-1] / 5
    row = torch.cat([numbers, -ties, others.clamp(-numbers[-1], numbers[-1])])[None].half()

    operand = quantized(row, bits)

    distance = (row.double().abs().unsqueeze(-1) - numbers).abs()
    tied = distance == distance.amin(dim=-1, keepdim=True)
    even = torch.arange(len(numbers)) % 2 == 0
    expected = numbers[(tied.int() * 2 + (tied & even).int()).argmax(dim=-1)] * row.double().sign()
    assert operand.scales.item() == 1
    assert torch.equal(operand.values.double(), expected)


@pytest.mark.parametrize(
    ("bits", "group", "largest"),
    [
        *((bits, None, [[3.0], [700.0], [0.0]]) for bits in (8, 6, 5)),
        (6, 2, [[3.0, 0.5], [700.0, 0.0], [0.0, 0.0]]),
    ],
)
def test_scales_are_a_rows_or_a_groups_own(bits, group, largest):
    matrix = torch.tensor([[1.0, -3.0, 0.5], [700.0, 0.1, 0.0], [0.0, 0.0, 0.0]]).half()

    operand = quantized(matrix, bits, group)

    assert torch.equal(operand.scales, (torch.tensor(largest) / MAGNITUDES[bits].max()).half())
    assert operand.dequantize()[2].tolist() == [0.0, 0.0, 0.0]


def test_values_past_a_rounded_scale_saturate():
    # 3.5e-5 / 448 is 1.3 times FP16's smallest number, to which it rounds.
    matrix = torch.tensor([[3.5e-5, 1e-5]]).half()

    operand = quantized(matrix, 8)

    assert bool(torch.isfinite(operand.values.double()).all())
    assert operand.values.double()[0, 0] == 448


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ("fp8/row", "int8/row"),
        ("int8/row", "fp8/row"),
        ("fp6/row", "int6/row"),
        ("int4/128", "mixed4/128"),
    ],
)
def test_codes_of_another_format_are_refused(wanted, given):
    operand = quantize(torch.ones(2, 300), NumberFormat.parse(given))

    with pytest.raises(ShapeError, match=f"need codes of format {wanted}, got {given}"):
        checked_scales(operand, NumberFormat.parse(wanted))


@pytest.mark.parametrize("bits", [6, 5])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (37, 300), (1, 1)])
def test_every_lane_finds_the_numbers_of_its_fragments(bits, n, k):
    codes = torch.randint(1 << bits, (n, k), generator=torch.Generator().manual_seed(n))
    if n * k >= 1 << bits:
        codes.view(-1)[: 1 << bits] = torch.arange(1 << bits)  # every code is there
    values = numbers_of(bits)[codes].half()
    tiles = tile_minifloats(values, bits)
    words = tiles.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    high = words[:, :, :256].view(*tiles.shape[:2], 2, 32, 4)
    low = words[:, :, 256:].view(*tiles.shape[:2], 32, -1)

    def of_lane(lane):
        parts = [high[:, :, 0, lane], high[:, :, 1, lane], low[:, :, lane]]
        return partial(operand_register, torch.cat(parts, dim=2), bits)

    assert torch.equal(operands.weights_of_lanes(n, k, of_lane), values.double())


@pytest.mark.parametrize("label", ["fp6-w6a16", "fp5-w5a16", "fp6-w6a16[fine]"])
def test_every_code_counts_for_its_number_on_the_cpu(label):
    kernel = operands.linear_kernel(label, "cpu")
    bits, group = kernel.spec.weight.bits, kernel.spec.weight.group
    numbers = numbers_by_code(bits)
    w = operands.unit_operand(torch.diag(numbers).half(), bits, group, 0.5)
    x = Operand(torch.ones(1, len(numbers)).half(), None, 16, None)
    out = torch.empty(1, len(numbers)).half()

    kernel.gemm(kernel.pack_activation(x), kernel.pack_weight(w), out)

    assert torch.equal(out[0].double(), numbers / 2)

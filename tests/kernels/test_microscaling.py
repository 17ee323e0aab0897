"""MX and NVFP4 weights: the tiles and scales as csrc/weight_only/layout.cuh reads them."""

from __future__ import annotations

import operands
import pytest
import torch

from flexq_bench.kernels.cuda.weight_only.microscaling import (
    VIEWS,
    relative_scales,
    tile_byte_scales,
    tile_halves,
)
from flexq_bench.kernels.formats import FLOAT_TYPES, FP16, NumberFormat, Operand, quantize
from flexq_bench.schemes.kernel_choice import kernel_label

HIGH, LOW, MASK32 = 0x0F000F00, 0x8F808F80, 0xFFFFFFFF


def e2m1_register(words, mma, register):
    word = words[..., mma]
    if register >= 2:
        word = sum((word >> bit & 1) << 31 - bit for bit in range(32))
    return word << 8 * (register % 2) & 0x8E008E00


def e2m3_register(words, mma, register):
    result = 0
    for word, left in VIEWS.registers[4 * (mma % 2) + register]:
        bits = words[..., 8 + mma // 2 if word == 2 else mma // 2 * 2 + word]
        result = result ^ (bits << left | bits >> 32 - left)
    return result & 0x8F808F80


def e4m3_register(words, mma, register):
    word = words[..., 2 * mma + register // 2]
    bits = word if register % 2 == 0 else word << 7 & 0x3F803F80 | word << 1 & ~0x3F803F80
    return bits & 0xBF80BF80


def values_of(bits, unit):
    """The two weights of an operand register: halves that are `unit` of the numbers."""
    halves = torch.stack([bits & 0xFFFF, bits >> 16 & 0xFFFF])
    return list(halves.to(torch.int16).view(torch.float16).double() / unit)


@pytest.mark.parametrize(
    ("element", "register_of", "unit"),
    [
        ("e2m1", e2m1_register, 2.0**-14),
        ("e2m3", e2m3_register, 2.0**-14),
        ("e4m3", e4m3_register, 2.0**-8),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (37, 300), (1, 1)])
def test_every_lane_finds_the_numbers_of_its_fragments(element, register_of, unit, n, k):
    numbers = FLOAT_TYPES[element].numbers()
    numbers = numbers[numbers.isfinite()]
    codes = torch.randint(len(numbers), (n, k), generator=torch.Generator().manual_seed(n))
    if n * k >= len(numbers):
        codes.view(-1)[: len(numbers)] = torch.arange(len(numbers))  # every code is there
    values = numbers[codes].half()
    tiles = tile_halves(values, FLOAT_TYPES[element])
    vectors = tiles.view(torch.int32).view(*tiles.shape[:2], -1, 32, 4).long() & MASK32

    def of_lane(lane):
        words = vectors[:, :, :, lane].reshape(*tiles.shape[:2], -1)
        return lambda mma, register: values_of(register_of(words, mma, register) & MASK32, unit)

    assert torch.equal(operands.weights_of_lanes(n, k, of_lane), values.double())


@pytest.mark.parametrize(("octaves", "is_relative"), [(22, True), (23, False)])
def test_scales_as_halves_and_a_factor_are_the_same(octaves, is_relative):
    generator = torch.Generator().manual_seed(octaves)
    matrix = torch.randn(5, 200, generator=generator).half()
    weight = quantize(matrix, NumberFormat.parse("mxfp6-e2m3"))
    exponents = weight.scales.view(torch.uint8)
    exponents[:] = torch.randint(100 - octaves, 101, exponents.shape, generator=generator)
    exponents[0, :2] = torch.tensor([100 - octaves, 100], dtype=torch.uint8)
    exponents[1, 2] = 3  # of zeros
    weight.values[1, 64:96] = 0

    relative = relative_scales(weight)

    assert (relative is not None) == is_relative
    if relative is not None:
        halves = (relative.halves.int() << 8).to(torch.int16).view(torch.float16)
        operands = weight.values.half() * 2.0**-14 * halves.repeat_interleave(32, 1)[:, :200]
        values = operands.double() * 2.0**14 * relative.of_rows.double()[:, None]
        assert torch.equal(values, weight.dequantize())


@pytest.mark.parametrize("group", [32, 16])
def test_every_lane_finds_the_scales_of_its_rows(group):
    n, k = 37, 300
    scales = torch.randint(1, 256, (n, -(-k // group))).to(torch.uint8)
    tiled = tile_byte_scales(scales, 128 // group).view(3, 3, 8, 32 // group, 2, 4)

    for row, column in ((0, 0), (9, 130), (36, 299)):
        part = column % 32 // group  # of the lane's 32 k
        at = row // 16, column // 128, row % 8, part, row % 16 // 8, column % 128 // 32
        assert tiled[at] == scales[row, column // group]
    assert not tiled[2, :, 5:].any()
    assert not tiled[:, 2, :, :, :, 2:].any()


@pytest.mark.parametrize(
    ("weight", "activation", "label"),
    [
        ("mxfp4", "fp16", "mxfp4-w4a16"),
        ("mxfp6-e2m3", "fp16", "mxfp6-w6a16"),
        ("mxfp6-e3m2", "fp16", "mxfp6-w6a16[e3m2]"),
        ("nvfp4", "fp16", "nvfp4-w4a16"),
        ("mxfp6-e2m3", "int8/row", "mxfp6-w6a8"),
        ("int4/32", "fp16", "w4a16[g32]"),
        ("uint4/64", "fp16", "w4a16[zeros,g64]"),
        ("int8/64", "fp16", "w8a16[g64]"),
        ("int4/128", "fp8/row", "w4afp8"),
        ("fp8/128x128", "fp8/128", "fp8-w8a8[blocks]"),
    ],
)
def test_layers_of_these_formats_have_a_kernel(weight, activation, label):
    formats = NumberFormat.parse(weight), NumberFormat.parse(activation)

    assert kernel_label(*formats) == label


@pytest.mark.parametrize(
    "name", ["mxfp4", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp8", "nvfp4", "fp8/row", "fp8/128x128"]
)
@pytest.mark.parametrize(("n", "k"), [(24, 200), (1, 1)])
def test_the_cpu_multiplies_what_the_codes_stand_for(name, n, k):
    generator = torch.Generator().manual_seed(n)
    number = NumberFormat.parse(name)
    matrix = torch.randn(n, k, generator=generator).half() * 0.02
    x = torch.randn(5, k, generator=generator).half()
    label = kernel_label(number, FP16)
    kernel = operands.linear_kernel(label, "cpu")
    out = torch.empty(5, n).half()

    weight = kernel.pack_weight(quantize(matrix, number))
    kernel.gemm(kernel.pack_activation(Operand(x, None, 16, None)), weight, out)

    assert torch.equal(out, (x.double() @ number.round(matrix).double().T).half())

"""Weights for 8-bit tensor cores: formats, layout and what lanes make of it, without a GPU.

Nibbles, the 6-bit codes that become int8 with their group's scale, and MXFP6, which becomes E4M3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import operands
import pytest
import torch

from flexq_bench.kernels.cuda.imma.microscaling import views_of
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import quantize_dual_grained
from flexq_bench.kernels.formats.dual_grained import int8_values
from flexq_bench.kernels.reference import reference_gemm

GROUP = 128
WORD = 0xFFFFFFFF


def lanes_words(packed, lane):
    """The words int64 [tiles, groups, 8 or 12] that a lane loads of each tile."""
    tiles = packed.buffers["tiles"].view(torch.int32)
    vectors = tiles.view(*tiles.shape[:2], -1, 32, 4).to(torch.int64) & WORD
    return vectors[:, :, :, lane].reshape(*tiles.shape[:2], -1)


def signed_bytes(words):
    """int64 [..., 4]: the bytes of 32-bit words, lowest first, as int8."""
    unsigned = torch.stack([words >> 8 * i & 255 for i in range(4)], dim=-1)
    return (unsigned + 128) % 256 - 128


def where_operands_lie(lane, o):
    """Row of the tile and first k of the group of operand word o (csrc/imma/layout.cuh)."""
    return lane // 4 + 8 * (o % 2), 32 * (lane % 4) + 8 * (o // 4) + 4 * (o % 4 // 2)


def sixteen_times_the_code(packed, words, lane, o):
    """`group-w4a8`: the nibble is the upper half of an int8."""
    word = words[:, :, o // 4 * 2 + o % 2]
    return signed_bytes((word if o % 4 >= 2 else word << 4) & 0xF0F0F0F0)


def dual_grained(packed, words, lane, o):
    """`dgq-w4a8`: nibble times scale plus scale times zero point, four at once."""
    word = words[:, :, o // 4 * 2 + o % 2]
    nibbles = (word >> 4 if o % 4 >= 2 else word) & 0x0F0F0F0F
    pairs = packed.buffers["scales"].long()  # [tiles, groups, 8, 2, 2]
    factor, zero = pairs[:, :, lane // 4, o % 2].unbind(-1)
    return signed_bytes((nibbles * factor + (factor * zero + 128) * 0x01010101) ^ 0x80808080)


def two_level(packed, words, lane, o):
    """`dual-w6a8`: the fourth code of a quad is in the upper bits of the other three."""
    first, second, third = words[:, :, o // 4 * 3 : o // 4 * 3 + 3].unbind(-1)
    if o % 4 < 3:
        codes = words[:, :, o // 4 * 3 + o % 4] & 0x3F3F3F3F
    else:
        upper = [word >> 6 & 0x03030303 for word in (first, second, third)]
        codes = upper[0] << 4 | upper[1] << 2 | upper[2]
    factors = packed.buffers["scales"].view(torch.int16).long()  # [tiles, groups, 8, 2, 1]
    factor = factors[:, :, lane // 4, o % 2, 0]
    return signed_bytes((codes * factor + 0x80808080 - factor * 0x20202020) ^ 0x80808080)


def mxfp6(exponent_bits, packed, words, lane, o):
    """Halves times their scale, rounded to E4M3, in units of 2^-9; E3M2: cut to E5M2, 2^-16."""
    views = views_of(exponent_bits)
    scale = halves_of(packed.buffers["scales"][:, :, lane, o % 2].long() << 8)
    numbers = []
    for register in views.registers[2 * (o % 4) : 2 * (o % 4) + 2]:
        bits = 0
        for word, left in register:
            of_mma = words[:, :, o // 4 * 3 + word]
            bits = bits ^ (of_mma << left if left >= 0 else of_mma >> -left)
        bits = bits & views.mask
        numbers += [halves_of(bits & 0xFFFF) * scale, halves_of(bits >> 16 & 0xFFFF) * scale]
    products = torch.stack(numbers, dim=-1).half()
    if exponent_bits == 2:
        return (products.to(torch.float8_e4m3fn).double() * 2**9).long()
    return (halves_of(products.view(torch.int16).long() & 0xFF00).double() * 2**16).long()


def halves_of(bits):
    return bits.to(torch.int16).view(torch.float16).float()


def operands_of_lanes(packed, operand_of):
    """The operands int64 [tiles * 16, groups * 128] that all lanes make."""
    row_tiles, groups = packed.buffers["tiles"].shape[:2]
    found = torch.zeros(row_tiles, 16, groups, GROUP, dtype=torch.int64)
    for lane in range(32):
        words = lanes_words(packed, lane)
        for o in range(16):
            row, first = where_operands_lie(lane, o)
            found[:, row, :, first : first + 4] = operand_of(packed, words, lane, o)
    return found.view(row_tiles * 16, groups * GROUP)


@pytest.mark.parametrize(("n", "k"), [(16, 128), (37, 300), (1, 1)])
@pytest.mark.parametrize(
    ("label", "operand_of"),
    [
        ("group-w4a8", sixteen_times_the_code),
        ("dgq-w4a8", dual_grained),
        ("dual-w6a8", two_level),
    ],
)
def test_lanes_get_int8_weights_from_packed_codes(label, operand_of, n, k):
    kernel = operands.linear_kernel(label, "cuda")
    weight = operands.random_weight(kernel.spec.weight, n, k, seed=n)

    found = operands_of_lanes(kernel.pack_weight(weight), operand_of)

    expected = torch.zeros_like(found)
    expected[:n, :k] = 16 * weight.values if label == "group-w4a8" else int8_values(weight)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("n", "k"), [(16, 128), (37, 300), (1, 1)])
@pytest.mark.parametrize(
    ("label", "exponent_bits", "exact_octaves", "unit"),
    [("mxfp6-w6a8[fp8]", 2, 7, 2.0**-10), ("mxfp6-w6a8[e3m2,fp8]", 3, 15, 2.0**-19)],
)
def test_lanes_round_blocks_far_below_the_largest(label, exponent_bits, exact_octaves, unit, n, k):
    kernel = operands.linear_kernel(label, "cuda")
    weight = operands.random_weight(kernel.spec.weight, n, k, seed=n)
    below = torch.randint(0, 30, weight.scales.shape, generator=torch.Generator().manual_seed(k))
    below[:, 0] = 0
    weight.values[:, 0] = 1.0  # a block of zeros has no scale
    weight = replace(weight, scales=torch.exp2(-below.float()).to(weight.scales.dtype))

    packed = kernel.pack_weight(weight)
    found = operands_of_lanes(packed, partial(mxfp6, exponent_bits))

    # In units of the row's largest scale.
    assert bool((packed.buffers["features"] * 2.0 ** (2 * exponent_bits - 3) == 1).all())
    error = (found[:n, :k] * unit - weight.dequantize()).abs()
    is_near = (below <= exact_octaves).repeat_interleave(32, dim=1)[:, :k]
    assert not error[is_near].any()
    assert bool((error <= (unit / 2 if exponent_bits == 2 else unit)).all())
    assert not found[n:].any()
    assert not found[:, k:].any()


def test_dual_grained_quantization_keeps_values_within_int8_and_close():
    matrix = torch.randn(9, 300, generator=torch.Generator().manual_seed(5)).half()
    matrix[3, :128] = matrix[3, :128].abs()  # a group of one sign
    matrix[4] = 0
    matrix[5, 7] = 60  # one large value: a fine scale for the other groups

    weight = quantize_dual_grained(matrix)

    values = int8_values(weight)
    assert torch.equal(weight.dequantize(), values.double() * weight.row_scales.double())
    step = weight.scales.double().repeat_interleave(GROUP, dim=1)[:, :300]
    step = step * weight.row_scales.double()
    # Half a step of rounding, and half of one where the zero point was rounded away from the range.
    assert bool(((weight.dequantize() - matrix.double()).abs() <= step * 1.01).all())
    assert not weight.dequantize()[4].any()


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("label", "changes", "message"),
    [
        *(
            ("dgq-w4a8", {"scales": scale, "zero_points": zero, "values": code}, "must fit int8")
            for scale, zero, code in ((9, 0, 15), (9, -15, 0), (100, -8, 10), (127, -15, 0))
        ),
        ("dgq-w4a8", {"values": 16}, "codes"),
        ("dgq-w4a8", {"zero_points": 1}, "zero points"),
        ("dgq-w4a8", {"scales": 1.5}, "scales"),
        ("dual-w6a8", {"values": -32}, "codes"),
        ("dual-w6a8", {"scales": 5}, "scales"),
        ("dual-w6a8", {"scales": 0}, "scales"),
    ],
)
def test_weights_that_lift_to_no_int8_are_refused(backend, label, changes, message):
    kernel = operands.linear_kernel(label, backend)
    good = operands.random_weight(kernel.spec.weight, 2, 130, seed=1)
    kernel.pack_weight(good)
    changed = {name: getattr(good, name).clone() for name in changes}
    for name, value in changes.items():
        changed[name][1, -1] = value

    with pytest.raises(ShapeError, match=message):
        kernel.pack_weight(replace(good, **changed))


@pytest.mark.parametrize("label", ["dgq-w4a8", "dual-w6a8"])
def test_dual_grained_sums_are_exact_on_the_cpu(label):
    kernel = operands.linear_kernel(label, "cpu")
    w = operands.random_weight(kernel.spec.weight, 21, 300, seed=2)
    x = operands.unit_operand(operands.random_codes(5, 300, 8, seed=3), 8, None, 2.0**-10)
    out = torch.empty(5, 21).half()

    kernel.gemm(kernel.pack_activation(x), kernel.pack_weight(w), out)

    assert torch.equal(out, (x.values.double() @ w.dequantize().T * 2.0**-10).half())
    assert torch.equal(reference_gemm(x, w).y.half(), out)


@pytest.mark.parametrize("label", ["dgq-w4a8", "dual-w6a8"])
def test_k_past_what_int32_sums_is_refused(label):
    kernel = operands.linear_kernel(label, "cuda")
    longest = operands.random_weight(kernel.spec.weight, 1, 131071, seed=1)
    too_long = operands.random_weight(kernel.spec.weight, 1, 131072, seed=1)

    kernel.pack_weight(longest)
    with pytest.raises(ShapeError, match="at most 131,071, got 131,072"):
        kernel.pack_weight(too_long)

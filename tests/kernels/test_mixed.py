"""Atom's operands: groups in 4 bits, the last one in 8, channels in an order; without a GPU."""

from __future__ import annotations

from dataclasses import replace

import operands
import pytest
import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, quantize_mixed, quantize_symmetric
from flexq_bench.kernels.formats.mixed import ACTIVATION_CLIP, default_order
from flexq_bench.kernels.reference import reference_gemm

SHAPES = [(16, 256), (37, 300), (3, 128), (1, 1)]


def some_order(k, seed):
    return torch.randperm(k, generator=torch.Generator().manual_seed(seed)).to(torch.int32)


@pytest.mark.parametrize("k", [1, 2, 128, 300, 1111, 28672])
def test_default_order_is_a_permutation_with_distant_neighbours(k):
    order = default_order(k).long()

    assert torch.equal(order.sort().values, torch.arange(k))
    if k > 128:
        assert int((order[1:] - order[:-1]).abs().min()) > k // 4


def test_mixed_groups_have_4_bits_and_the_last_8():
    matrix = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).half()
    order = some_order(300, seed=2)

    operand = quantize_mixed(matrix, order)

    ordered = matrix[:, order.long()]
    head = quantize_symmetric(ordered[:, :256], 4)
    tail = quantize_symmetric(ordered[:, 256:], 8)
    assert torch.equal(operand.values, torch.cat([head.values, tail.values], dim=1))
    assert torch.equal(operand.scales, torch.cat([head.scales, tail.scales], dim=1))
    assert float((operand.in_own_order() - matrix.double()).abs().max()) < 0.5


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1, 3], [0, 1]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ShapeError, match="each of 3 columns once"):
        quantize_mixed(torch.ones(1, 3), torch.tensor(order))


def test_operands_in_different_orders_are_refused():
    matrix = torch.ones(2, 300).half()
    x, w = (quantize_mixed(matrix, some_order(300, seed)) for seed in (1, 2))

    with pytest.raises(ShapeError, match="different orders"):
        reference_gemm(x, w)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_8_bit_tail_is_two_tiles_of_nibbles(n, k):
    w = operands.random_mixed(n, k, seed=n)

    packed = operands.linear_kernel("atom-w4a4", "cuda").pack_weight(w)

    tiles = packed.buffers["tiles"]
    row_tiles, of_row = tiles.shape[:2]
    groups = -(-k // 128)
    assert of_row == groups + 1
    words = tiles.view(torch.int32).view(row_tiles, of_row, 2, 32, 4).to(torch.int64)
    found = torch.zeros(row_tiles, 16, of_row, 128, dtype=torch.int64)
    for lane in range(32):  # eight neighbouring k a word, the first four in the lower nibbles
        of_lane = words[:, :, :, lane].reshape(row_tiles, of_row, 8)
        for word in range(8):
            row, first = lane // 4 + 8 * (word % 2), 32 * (lane % 4) + 8 * (word // 2)
            for i in range(8):
                nibble = of_lane[:, :, word] >> (8 * (i % 4) + 4 * (i // 4)) & 15
                found[:, row, :, first + i] = (nibble ^ 8) - 8
    found = found.view(row_tiles * 16, of_row, 128)
    codes = torch.zeros(n, groups * 128, dtype=torch.int64)
    codes[:, :k] = w.values
    codes = codes.view(n, groups, 128)
    assert torch.equal(found[:n, : groups - 1], codes[:, :-1])
    assert torch.equal(found[:n, groups - 1] * 16 + found[:n, groups] + 8, codes[:, -1])
    assert torch.equal(packed.buffers["scales"][:, -1], packed.buffers["scales"][:, -2])


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sums_are_exact_on_the_cpu(n, k):
    kernel = operands.linear_kernel("atom-w4a4", "cpu")
    x = operands.random_mixed(4, k, seed=1, scale=2.0**-10)
    w = operands.random_mixed(n, k, seed=2)
    out = torch.empty(4, n).half()

    kernel.gemm(kernel.pack_activation(x), kernel.pack_weight(w), out)

    product = operands.int_gemm(x.values, w.values).double() * 2.0**-10
    assert torch.equal(out, product.half())


OUTLIER_LAST = torch.cat([torch.arange(7), torch.arange(8, 300), torch.tensor([7])])


@pytest.mark.parametrize(("order", "is_stored"), [(OUTLIER_LAST, True), (torch.arange(300), False)])
def test_input_is_read_in_the_order_of_the_weight(order, is_stored):
    kernel = operands.linear_kernel("atom-w4a4", "cpu")
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 300, generator=generator).half()
    x[:, 7] *= 100
    ordered = quantize_mixed(torch.randn(8, 300, generator=generator), order.to(torch.int32))
    w = ordered if is_stored else replace(ordered, order=None)
    packed, out = kernel.empty_activation(3, 300, x.device), torch.empty(3, 8).half()

    kernel.linear(x, packed, kernel.pack_weight(w), out)

    reference = reference_gemm(quantize_mixed(x, ordered.order, clip=ACTIVATION_CLIP), ordered)
    assert torch.equal(out, reference.y.half())


def test_atom_clips_4_bit_activation_groups():
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(4)).half()
    order = torch.arange(300)
    whole, clipped = (quantize_mixed(x, order, clip=share) for share in (1.0, ACTIVATION_CLIP))

    assert operands.linear_kernel("atom-w4a4", "cpu").spec.activation == NumberFormat(
        4, 128, "mixed", ACTIVATION_CLIP
    )
    expected = (x[:, :256].float().view(3, 2, 128).abs().amax(2) * 0.9 / 7).half()
    assert torch.equal(clipped.scales[:, :2], expected)
    assert torch.equal(clipped.scales[:, 2], whole.scales[:, 2])  # the group of 8 bits

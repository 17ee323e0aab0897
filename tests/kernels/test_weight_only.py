"""The weight-only kernels' layout and builds, on a machine without a GPU."""

from __future__ import annotations

from functools import partial

import operands
import pytest
import torch

from flexq_bench.kernels.cuda.weight_only.gemm import tile_scales, tile_weights
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.gemm import GemmWorkload


def operand_register(words, bits, mma, register):
    """The two codes of an A operand register, as kernels/csrc/weight_only/gemm.cu reads them.

    words: int64 [tiles, steps, words of one lane].
    """
    if bits == 8:
        word = words[:, :, 2 * mma + register // 2]
        return [((word >> 8 * (2 * (register % 2) + half)) & 255) - 128 for half in (0, 1)]
    return [((words[:, :, mma] >> 4 * (register + 4 * half)) & 15) - 8 for half in (0, 1)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(16, 128), (37, 300), (1, 1)])
def test_every_lane_finds_the_fragments_of_the_mma(bits, n, k):
    codes = operands.random_codes(n, k, bits, seed=n)
    tiles = tile_weights(codes, bits)
    vectors = tiles.view(torch.int32).view(*tiles.shape[:2], -1, 32, 4).to(torch.int64)

    def of_lane(lane):
        words = vectors[:, :, :, lane].reshape(*tiles.shape[:2], -1)
        return partial(operand_register, words, bits)

    assert torch.equal(operands.weights_of_lanes(n, k, of_lane), codes.double())


def test_scales_of_rows_eight_apart_lie_together():
    scales = torch.arange(20 * 3).view(20, 3).half()

    tiled = tile_scales(scales)

    assert tiled.shape == (2, 3, 8, 2)
    assert tiled[0, 2, 5].tolist() == [scales[5, 2], scales[13, 2]]
    assert tiled[1, 1, 3].tolist() == [scales[19, 1], 0]


@pytest.mark.parametrize("label", ["w8a16", "w4a16", "fp6-w6a16", "fp5-w5a16"])
def test_packed_weights_take_what_the_floor_reads(label):
    kernel = operands.linear_kernel(label, "cuda")
    weight = kernel.quantize_weight(torch.randn(64, 512, generator=torch.Generator()).half())

    number = kernel.spec.weight
    floor = GemmWorkload(1, 64, 512).weight_bytes(number.bits, number.group)
    assert kernel.pack_weight(weight).nbytes == floor


def test_zero_points_are_packed_next_to_scales():
    kernel = operands.linear_kernel("w4a16[zeros]", "cuda")
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (20, 300), generator=generator, dtype=torch.int8)
    zeros = torch.randint(0, 16, (20, 3), generator=generator, dtype=torch.int8)
    scales = torch.rand(20, 3, generator=generator).half()
    packed = kernel.pack_weight(Operand(codes, scales, 4, 128, zero_points=-zeros))

    quads = packed.buffers["scales"]
    assert quads.shape == (2, 3, 8, 4)
    assert quads[0, 2, 5].tolist() == [
        float(scales[5, 2]),
        float(scales[13, 2]),
        1024 + int(zeros[5, 2]),
        -64 - int(zeros[13, 2]),
    ]
    assert torch.equal(packed.buffers["tiles"], tile_weights(codes - 8, 4))


@pytest.mark.parametrize("label", ["w8a16", "w4a16", "w4a16[zeros]"])
def test_both_backends_agree_on_the_formats(label):
    cpu, cuda = resolve(label, "cpu"), resolve(label, "cuda")

    assert (cpu.spec.weight, cpu.spec.activation) == (cuda.spec.weight, cuda.spec.activation)

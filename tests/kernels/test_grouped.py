"""Weights of experts: their layout, and what the lanes of a warp make of it."""

from __future__ import annotations

import pytest
import torch

from flexq_bench.kernels.cuda.grouped.gemm import configs_for, layer_configs
from flexq_bench.kernels.cuda.grouped.packing import (
    EIGHT,
    FLEXQ,
    FOUR,
    SIX,
    pack_experts,
    packed_bytes,
)
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.registry import resolve
from flexq_bench.workloads.operation import operation

GROUP, BLOCK_TILES = 128, 4
SCALE_BYTES = {8: 0, 6: 1, 4: 2}  # of a row


def drawn(bits, n, k):
    """Parts of two experts and the int8 weights that they stand for."""
    generator = torch.Generator().manual_seed(n * k + bits)
    groups = -(-k // GROUP)

    def integers(low, high, *shape):
        return torch.randint(low, high, (2, *shape), generator=generator)

    def wide(of_groups):
        return of_groups.repeat_interleave(GROUP, dim=2)[..., :k]

    if bits == 8:
        codes = integers(-128, 128, n, k)
        return (codes.to(torch.int8),), codes
    if bits == 6:
        codes, scales = integers(-31, 32, n, k), integers(1, 5, n, groups)
        return (codes.to(torch.int8), scales.half()), codes * wide(scales)
    codes, scales = integers(0, 16, n, k), integers(1, 9, n, groups)
    zeros = integers(-15, 1, n, groups)
    parts = (codes.to(torch.int8), scales.half(), zeros.to(torch.int8))
    return parts, (codes + wide(zeros)) * wide(scales)


def lane_weights(bits, words, scales, lane, mma, register):
    """Four adjacent weights of an A operand (csrc/grouped/layout.cuh)."""
    of_mma = words[lane][mma * bits // 2 :]
    if bits == 8:
        return [byte - 256 * (byte > 127) for byte in of_mma[register]]
    of_row = (lane // 4 * 2 + register % 2) * SCALE_BYTES[bits]
    if bits == 6:
        codes = [byte & 63 for byte in of_mma[register]] if register < 3 else None
        if codes is None:
            codes = [sum((of_mma[i][b] >> 6) << (4 - 2 * i) for i in range(3)) for b in range(4)]
        return [(code - 32) * scales[of_row] for code in codes]
    nibbles = [byte >> 4 * (register // 2) & 15 for byte in of_mma[register % 2]]
    offset = scales[of_row + 1] - 256 * (scales[of_row + 1] > 127)
    return [nibble * scales[of_row] + offset for nibble in nibbles]


def unpacked(packed, bits, n, k):
    """The weights of one expert, read chunk by chunk as the kernels do."""
    data, at = packed.tolist(), 0
    tiles, groups = -(-n // 16), -(-k // GROUP)
    weights = torch.zeros(tiles * 16, groups * GROUP, dtype=torch.int64)
    for first in range(0, tiles, BLOCK_TILES):
        of_block = range(first, min(first + BLOCK_TILES, tiles))
        for group in range(groups):
            mmas = min(4, -(-(k - group * GROUP) // 32))
            tile_bytes = mmas * 64 * bits
            scales_at = at + len(of_block) * tile_bytes
            for i, tile in enumerate(of_block):
                begin = at + i * tile_bytes
                scales = data[scales_at + i * 16 * SCALE_BYTES[bits] :]
                words = [[] for _ in range(32)]
                for word in range(mmas * bits // 2):
                    for lane in range(32):
                        whole = word // 4 * 512 + lane * 16 + word % 4 * 4
                        place = begin + (whole if mmas == 4 else word * 128 + lane * 4)
                        words[lane].append(data[place : place + 4])
                for lane in range(32):
                    for mma in range(mmas):
                        for register in range(4):
                            row = tile * 16 + lane // 4 + 8 * (register % 2)
                            of_k = group * GROUP + 32 * mma + 4 * (lane % 4) + 16 * (register // 2)
                            weights[row, of_k : of_k + 4] = torch.tensor(
                                lane_weights(bits, words, scales, lane, mma, register)
                            )
            at = scales_at + len(of_block) * 16 * SCALE_BYTES[bits]
    assert at == len(data)
    return weights


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize(("n", "k"), [(96, 192), (40, 300), (16, 64), (70, 128)])
def test_lanes_find_every_weight_in_the_chunks(bits, n, k):
    parts, weights = drawn(bits, n, k)

    packed = pack_experts(*parts)

    assert packed.shape[1] == packed_bytes({8: EIGHT, 6: SIX, 4: FOUR}[bits], n, k)
    for expert in range(2):
        found = unpacked(packed[expert], bits, n, k)
        assert torch.equal(found[:n, :k], weights[expert])
        assert not found[n:].any()
        assert not found[:, k:].any()


def test_lanes_find_the_codes_and_halves_of_flexq():
    """Codes are the upper six bits of bytes; the fourth operand's are the lower two of three."""
    n, k, tile = 96, 192, 2
    (codes, _), _ = drawn(6, n, k)
    scales = torch.rand(2, n, -(-k // GROUP), generator=torch.Generator().manual_seed(0)).half()

    packed = pack_experts(codes, scales, half_scales=True)

    assert packed.shape[1] == packed_bytes(FLEXQ, n, k)
    of_codes = BLOCK_TILES * 16 * GROUP * 6 // 8
    halves = packed[1, of_codes : of_codes + BLOCK_TILES * 32].view(torch.float16).view(-1, 8, 2)
    assert torch.equal(halves.transpose(1, 2).flatten(), scales[1, : 16 * BLOCK_TILES, 0])
    words = packed[1, :of_codes].view(BLOCK_TILES, 3, 32, 4, 4)[tile].transpose(0, 1)
    for lane in range(32):
        of_mmas = words[lane].reshape(4, 3, 4)
        fourth = ((of_mmas & 3) << torch.tensor([[6], [4], [2]])).sum(1, keepdim=True)
        operands = torch.cat([of_mmas & 0xFC, fourth], dim=1).to(torch.uint8).view(torch.int8) // 4
        row, first = 16 * tile + lane // 4, 4 * (lane % 4)
        of_group = codes[1, row : row + 9 : 8, :GROUP].view(2, 4, 2, 16)[..., first : first + 4]
        assert torch.equal(operands.view(4, 2, 2, 4), of_group.permute(1, 2, 0, 3))


def test_groups_without_small_codes_keep_their_weights():
    codes = torch.randint(9, 16, (1, 16, 128), generator=torch.Generator().manual_seed(0))
    zeros, scales = torch.full((1, 16, 1), -15), torch.full((1, 16, 1), 21)

    packed = pack_experts(codes.to(torch.int8), scales.half(), zeros.to(torch.int8))

    assert torch.equal(unpacked(packed[0], 4, 16, 128), ((codes + zeros) * scales)[0])


def test_k_of_704_is_packed_without_padding():
    codes = torch.zeros(1, 64, 704, dtype=torch.int8)
    scales = torch.ones(1, 64, 6).half()

    assert pack_experts(codes, scales).numel() == 64 * (704 * 6 // 8 + 6)


@pytest.mark.parametrize("name", ["dual-w6a8", "dgq-w4a8", "w8a8", "flexq-w6a6", "fp16", "bf16"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_configurations_fit_and_hide_no_parameter(name, tokens):
    of = operation("grouped_linear")
    workload = of.workload(tokens=tokens, experts=8, top_k=2, n=704, k=704)

    for config in resolve(f"grouped-{name}", "cuda").candidates(workload):
        assert config.as_dict()["stages"] > 1
        assert not set(config.as_dict()) & {parameter.name for parameter in of.parameters}


def test_weights_past_int8_are_refused():
    kernel = resolve("grouped-dgq-w4a8", "cpu")
    parts = (
        torch.full((1, 16, 128), 15, dtype=torch.int8),
        torch.full((1, 16, 1), 20.0).half(),
        torch.ones(1, 16, 1).half(),
        torch.zeros(1, 16, 1, dtype=torch.int8),
    )

    with pytest.raises(ShapeError, match="must fit int8"):
        kernel._declared.prepare_weight(*parts)


@pytest.mark.parametrize(
    ("n", "k", "tile"), [(4096, 7168, 256), (2816, 704, 256), (1408, 2816, 128)]
)
def test_tiles_of_many_tokens_are_chosen_by_whole_waves(n, k, tile):
    """Those that were faster on an H200 by 10 to 13 %, 512 tokens for each of 8 experts."""
    values = {"experts": 8, "tokens": 512, "top_k": 8, "n": n, "k": k}
    assert configs_for(SIX, values)[0].as_dict()["tile_tokens"] == tile


@pytest.mark.parametrize(
    ("fmt", "tokens", "n", "blocks"),
    [(SIX, 1, 1408, 2), (SIX, 1, 2816, 3), (SIX, 64, 1408, 3), (FOUR, 64, 1408, 4)],
    ids=["few-rows", "more-rows", "six-bits", "four-bits"],
)
def test_blocks_of_few_tokens_follow_the_rows_of_experts(fmt, tokens, n, blocks):
    values = {"experts": 128, "tokens": tokens, "top_k": 8, "n": n, "k": 2816}
    assert configs_for(fmt, values)[0].as_dict()["blocks"] == blocks


def test_blocks_of_both_halves_of_a_layer_fill_multiprocessors():
    of_few = layer_configs(FOUR, 128, 64, 8)

    assert [config.as_dict()["blocks"] for config in of_few] == [3, 3]
    assert layer_configs(FOUR, 128, 128 * 16, 8) is None
    assert layer_configs(EIGHT, 128, 64, 8) is None

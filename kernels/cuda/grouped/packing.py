"""Weights of experts in the chunks of csrc/grouped/layout.cuh."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_ROWS
from flexq_bench.kernels.cuda.imma.dual_grained import tile_pairs
from flexq_bench.kernels.cuda.imma.four_bit import tile_nibbles
from flexq_bench.kernels.cuda.imma.two_level import tile_sixes

BLOCK_TILES = 4  # row tiles of a chunk
_MMA_K, _LANES = 32, 32
_MMAS = GROUP // _MMA_K  # of a tile


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """Sizes of packed weights. w_bits: 6 or 4, with integer scales of groups, or 8.

    element: 0 of integers; 1 of FP16 and 2 of BF16, whose values are two columns of 8 bits.
    half_scales: FP16 scales of groups, of 6 bits.
    """

    w_bits: int
    element: int = 0
    half_scales: bool = False

    @property
    def mma_bytes(self) -> int:
        """Bytes of the operands of an MMA."""
        return MMA_ROWS * _MMA_K * self.w_bits // 8

    @property
    def tile_scale_bytes(self) -> int:
        return MMA_ROWS * {4: 2, 6: 1 + self.half_scales, 8: 0}[self.w_bits]

    @property
    def for_many(self) -> bool:
        """True if csrc/grouped/many_tokens.cu has a kernel of it."""
        return not self.element and not self.half_scales

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a whole chunk."""
        return BLOCK_TILES * (_MMAS * self.mma_bytes + self.tile_scale_bytes)


SIX, FOUR, EIGHT = ExpertFormat(6), ExpertFormat(4), ExpertFormat(8)
FP16, BF16 = ExpertFormat(8, 1), ExpertFormat(8, 2)
FLEXQ = ExpertFormat(6, half_scales=True)


def packed_bytes(fmt: ExpertFormat, n: int, k: int) -> int:
    """Return the bytes of an expert's chunks: K is padded to a multiple of 32, N of 16."""
    tile_bytes = -(-k // _MMA_K) * fmt.mma_bytes + -(-k // GROUP) * fmt.tile_scale_bytes
    return -(-n // MMA_ROWS) * tile_bytes


def pack_experts(
    codes: torch.Tensor,
    scales: torch.Tensor | None = None,
    zero_points: torch.Tensor | None = None,
    *,
    half_scales: bool = False,
) -> torch.Tensor:
    """Pack codes [experts, N, K] to chunks, uint8 [experts, bytes of an expert].

    scales, zero_points: integers [experts, N, ceil(K / 128)] of 6- or 4-bit codes, the latter of
    4-bit codes only, to which they are added. half_scales: scales are FP16, not integers. Without
    scales, codes are int8, or FP16 or BF16
    weights viewed as int8 [experts, N, 2 * K].
    """
    experts, n, k = codes.shape
    row_tiles, steps = -(-n // MMA_ROWS), -(-k // GROUP)
    last_mmas = -(-(k - (steps - 1) * GROUP) // _MMA_K)
    fmt = EIGHT if scales is None else SIX if zero_points is None else FOUR
    fmt = FLEXQ if half_scales else fmt
    if scales is not None and zero_points is not None:
        # Scale times zero point is at least -128: a group whose codes allow less has no small ones.
        least = -torch.div(128, scales.clamp(min=1), rounding_mode="floor").to(torch.int8)
        moved = zero_points.to(torch.int8).maximum(least)
        codes = codes - (moved - zero_points).to(torch.int8).repeat_interleave(GROUP, 2)[..., :k]
        zero_points = moved
        # Past K, codes are minus the zero point: weights of zero.
        past = (-zero_points[..., -1:].to(torch.int8)).expand(experts, n, -k % GROUP)
        codes = torch.cat([codes, past], dim=2)
    rows = row_tiles * MMA_ROWS
    whole = torch.stack([padded(of_expert, rows, steps * GROUP) for of_expert in codes])
    tiles = _tiles(_tile_order(whole.view(experts * rows, -1)), fmt)
    tiles = tiles.view(experts, row_tiles, steps, -1)
    last = _cut(tiles[:, :, -1], fmt, last_mmas)
    of_groups = tiles.new_empty(experts, row_tiles, steps, 0)
    if scales is not None:
        parts = [scales.to(torch.int8)]
        if half_scales:
            parts = list(scales.half().view(torch.int8).view(*scales.shape, 2).unbind(3))
        if zero_points is not None:
            parts.append((scales.short() * zero_points.short()).to(torch.int8))
        pairs = torch.stack([*parts, *(torch.zeros_like(parts[0]),)][:2], dim=3)
        even = torch.stack([padded(p.reshape(n, -1), rows, 2 * steps) for p in pairs])
        # [.., 8, rows r and r + 8, 2]; of 6 bits only the scale is kept.
        tiled = tile_pairs(even.view(experts * rows, steps, 2))[..., : fmt.tile_scale_bytes // 16]
        of_groups = tiled.reshape(experts, row_tiles, steps, -1).view(torch.uint8)
    blocks = []
    for first in range(0, row_tiles, BLOCK_TILES):
        of_block = slice(first, min(first + BLOCK_TILES, row_tiles))
        for tile_bytes, scale_bytes in (
            (tiles[:, of_block, :-1], of_groups[:, of_block, :-1]),
            (last[:, of_block, None], of_groups[:, of_block, -1:]),
        ):
            chunks = (b.transpose(1, 2).flatten(2) for b in (tile_bytes, scale_bytes))
            blocks.append(torch.cat(list(chunks), dim=2).flatten(1))
    return torch.cat(blocks, dim=1)


def _tile_order(codes: torch.Tensor) -> torch.Tensor:
    """Reorder the k of each group [rows, K] so that tiles in the order of imma/layout.cuh get it.

    There, lane quarter q has 32 adjacent k, here those of an MMA m are 4·q and 16 later.
    """
    split = codes.view(len(codes), -1, _MMAS, 2, 4, 4)
    row, group, mma, upper, quarter, byte = range(6)
    return split.permute(row, group, quarter, mma, upper, byte).reshape(codes.shape)


def _tiles(codes: torch.Tensor, fmt: ExpertFormat) -> torch.Tensor:
    if fmt is SIX:
        return tile_sixes(codes)
    if fmt is FLEXQ:  # codes above the bits of each fourth operand, not below, and with a sign
        tiles = tile_sixes(codes)
        words = tiles.view(*tiles.shape[:2], 3, _LANES, 4, 4)
        sign_of_fourth = words.new_tensor([2, 0, 0]).repeat(4).view(3, 1, 4, 1)
        return (((words & 63 ^ 32) << 2) | (words >> 6 ^ sign_of_fourth)).view(tiles.shape)
    if fmt is FOUR:
        return tile_nibbles(codes)
    # A row is half·8 + lane_row; a k of a group is 32·quarter + 8·mma + 4·upper + byte.
    split = codes.view(torch.uint8).view(-1, 2, 8, codes.shape[1] // GROUP, 4, 4, 2, 4)
    tile, half, lane_row, group, quarter, mma, upper, byte = range(8)
    words = split.permute(tile, group, mma, lane_row, quarter, upper, half, byte)
    return words.reshape(len(split), split.shape[3], -1)


def _cut(tiles: torch.Tensor, fmt: ExpertFormat, mmas: int) -> torch.Tensor:
    """Keep the first MMAs of tiles [..., bytes], as uint32 [words][lanes] unless they are all."""
    if mmas == _MMAS:
        return tiles
    words = tiles.view(*tiles.shape[:-1], -1, _LANES, 4, 4).movedim(-3, -2).flatten(-4, -3)
    return words[..., : mmas * fmt.mma_bytes // (4 * _LANES), :, :].flatten(-3)

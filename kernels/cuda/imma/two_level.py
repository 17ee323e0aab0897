"""`dual-w6a8`: 6-bit codes times group scales, integers from 1 to 4, are int8 weights.

This is not in a paper: DGQ's two levels of scales (arXiv 2310.04836; dual_grained.py) with 6 bits.
Sums are integers over all of K, scaled once; csrc/imma/group_gemm*.cu dequantize in registers.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.contract import KernelSpec, PackedOperand, checked_scales
from flexq_bench.kernels.cuda.imma.configuration_choice import TWO_LEVEL
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_ROWS, TileFormat
from flexq_bench.kernels.cuda.imma.dual_grained import check_longest_k, tile_pairs
from flexq_bench.kernels.cuda.imma.four_bit import TokenScaledGemm
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.dual_grained import SIX_BITS, int8_values

_ZERO = 32  # unsigned code of 0


class TwoLevelGemm(TokenScaledGemm):
    """`dual-w6a8`."""

    tiles = TileFormat(SIX_BITS, dual_grained=True, a_grouped=False)
    choice = TWO_LEVEL
    spec = KernelSpec(
        name="dual-w6a8",
        backend="cuda",
        weight=NumberFormat(SIX_BITS, GROUP, kind="dual"),
        activation=NumberFormat(8),
        summary="6-bit weights made int8 with their group's scale, one integer sum over all of K",
        overlaps_launches=True,
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        int8_values(weight)
        check_longest_k(self.spec, weight.k, "flexq[w6a8]")
        assert weight.row_scales is not None  # checked by checked_scales
        int8_scales = scales.to(torch.int8)
        buffers = {
            "tiles": tile_sixes(weight.values),
            # A 16-bit integer per row.
            "scales": tile_pairs(torch.stack([int8_scales, torch.zeros_like(int8_scales)], dim=2)),
            "features": weight.row_scales[:, 0].contiguous(),
        }
        return PackedOperand(buffers, weight.rows, weight.k)


def tile_sixes(codes: torch.Tensor) -> torch.Tensor:
    """Reorder 6-bit codes [N,K] to W_BITS 6, DUAL_GRAINED tiles (csrc/imma/layout.cuh).

    Tiles are uint8 [N/16, K/128, bytes of a tile], both rounded up and padded with codes of zero.
    """
    operands = tile_operands(codes.add(_ZERO).to(torch.uint8), _ZERO)
    row_tiles, groups = operands.shape[:2]
    # Each of the first three operand words of an MMA stores two bits of the fourth in every byte.
    words, last = operands[..., :3, :].contiguous(), operands[..., 3, :]
    for i in range(3):
        words[..., i, :] |= (last >> (4 - 2 * i) & 3) << SIX_BITS
    vectors = words.view(row_tiles, groups, 32, 3, 16)  # 16 bytes: one load of a lane
    return vectors.transpose(2, 3).reshape(row_tiles, groups, -1)


def tile_operands(values: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Reorder [N,K] to the lanes of tiles: [N/16, K/128, 32 lanes, 4 MMAs, 4 words, 4 bytes]."""
    row_tiles, groups = -(-values.shape[0] // MMA_ROWS), -(-values.shape[1] // GROUP)
    past = (0, groups * GROUP - values.shape[1], 0, row_tiles * MMA_ROWS - values.shape[0])
    whole = torch.nn.functional.pad(values, past, value=padding)
    # A row is half·8 + lane_row; a k of a group is 32·quarter + 8·mma + 4·upper + byte.
    split = whole.view(row_tiles, 2, 8, groups, 4, 4, 2, 4)
    tile, half, lane_row, group, quarter, mma, upper, byte = range(8)
    operands = split.permute(tile, group, lane_row, quarter, mma, upper, half, byte)
    return operands.reshape(row_tiles, groups, 32, 4, 4, 4)

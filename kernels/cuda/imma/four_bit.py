"""4-bit weights for int8 tensor cores: their layout, and a base class for INT8 activations.

`group-w4a8` is the baseline of DGQ (arXiv 2310.04836; dual_grained.py): symmetric codes with an
FP16 scale per group. The sums of every group are converted and scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import (
    Config,
    KernelSpec,
    PackedOperand,
    Packing,
    checked_scales,
)
from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.cublas.rows import INT8_ROWS
from flexq_bench.kernels.cuda.imma.configuration_choice import GROUP_SCALED, MAX_FEW
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_ROWS, ImmaConfig, TileFormat
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.weight_only.gemm import tile_scales
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.nvrtc import Build

BITS, _MASK = 4, 15


def tile_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Reorder the lowest four bits of codes [N,K] to W_BITS 4 tiles of csrc/imma/layout.cuh.

    Tiles are uint8 [N/16, K/128, bytes of a tile], both rounded up and padded with zeros.
    """
    row_tiles, groups = -(-nibbles.shape[0] // MMA_ROWS), -(-nibbles.shape[1] // GROUP)
    whole = padded(nibbles.to(torch.uint8) & _MASK, row_tiles * MMA_ROWS, groups * GROUP)
    # A row is half·8 + lane_row, a k of a group 32·quarter + 16·vector + 8·word + 4·upper + byte.
    split = whole.view(row_tiles, 2, 8, groups, 4, 2, 2, 2, 4)
    in_bytes = split[..., 0, :] | split[..., 1, :] << BITS
    tile, half, lane_row, group, quarter, vector, word, byte = range(8)
    ordered = in_bytes.permute(tile, group, vector, lane_row, quarter, word, half, byte)
    return ordered.reshape(row_tiles, groups, -1)


class TokenScaledGemm(ImmaGemm):
    """Base class for activations with one scale per token, or one static scale.

    rows: quantizes them. A buffer `static` of the activations has the static scale.
    """

    rows = INT8_ROWS

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        b = packed.buffers
        in_mma_order = self.in_mma_order(packed.rows, packed.k)
        self.rows.quantize(x, b["codes"], b["scales"], b.get("static"), in_mma_order=in_mma_order)

    def packing(self, x: PackedOperand, config: Config | None) -> Packing | None:
        if "static" in x.buffers:
            return None
        in_mma_order = self.in_mma_order(x.rows, x.k)
        return Packing("row-codes", 8, x.buffers["codes"], x.buffers["scales"], in_mma_order)

    def packing_builds(self) -> Sequence[Build]:
        return [self.rows.build]


class GroupScaledGemm(TokenScaledGemm):
    """`group-w4a8`."""

    tiles = TileFormat(BITS, a_grouped=False)
    choice = GROUP_SCALED
    spec = KernelSpec(
        name="group-w4a8",
        backend="cuda",
        weight=NumberFormat(BITS, GROUP),
        activation=NumberFormat(8),
        summary="4-bit weights with an FP16 scale per group, sums of groups converted one by one",
        overlaps_launches=True,
    )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        buffers = {"tiles": tile_nibbles(weight.values), "scales": tile_scales(scales)}
        return PackedOperand(buffers, weight.rows, weight.k)

    def builds(self) -> Sequence[Build]:
        """Return the largest builds for few tokens and all for many; `dgq-w4a8` has the others."""
        few = [self.choice.for_few(m, GROUP)[-1] for m in (1, MAX_FEW)]
        many = [c for c in self.every_config() if not isinstance(c, ImmaConfig)]
        return [config.build(self.tiles) for config in (*few, *many)]

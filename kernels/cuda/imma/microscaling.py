"""`mxfp6-w6a8[fp8]`, E2M3, and `[e3m2,fp8]`: MXFP6 weights, E4M3 activations, FP8 tensor cores.

csrc/imma/group_gemm*.cu make E2M3 E4M3 and E3M2 E5M2 in registers: numbers times their block's
scale relative to the largest scale of the row. This is exact for blocks up to 7 (E3M2: 15) octaves
below; others are rounded to multiples of 2^-10 (2^-19, towards zero) of the largest scale. Sums
have the bits of FP8 tensor cores, and are scaled once, by row and token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, PackedOperand, checked_scales
from flexq_bench.kernels.cuda.bit_views import BitViews
from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.cublas.rows import FP8_ROWS
from flexq_bench.kernels.cuda.imma.configuration_choice import TWO_LEVEL
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_ROWS, TileFormat
from flexq_bench.kernels.cuda.imma.four_bit import TokenScaledGemm
from flexq_bench.kernels.cuda.imma.two_level import tile_operands
from flexq_bench.kernels.cuda.weight_only.microscaling import octaves_below, scale_bytes
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.workloads.case import parse_kernel_label

# Formats of weights by label.
KERNELS = {"mxfp6-w6a8[fp8]": "mxfp6-e2m3", "mxfp6-w6a8[e3m2,fp8]": "mxfp6-e3m2"}
_BLOCKS = GROUP // 32  # of a row in a tile
# FP8 tensor cores of Hopper accumulate with around 14 bits (arXiv 2412.19437, section 3.3.2), four
# more than this (Reference.rounded_to). cuBLASLt promotes its sums to FP32 now and then.
_TERM_BITS = 10


def views_of(exponent_bits: int) -> BitViews:
    """Return the eight words of halves of an MMA (csrc/imma/layout.cuh)."""
    few, right = exponent_bits + 3, -3
    many = few + 2
    registers = (
        *(((2, 0), (2, few)), ((2, many), (0, 0)), ((0, few), (1, 0)), ((1, many), (0, few))),
        *(((0, many), (1, few)), ((2, right), (0, many)), ((1, right), (2, few))),
        ((2, many), (0, right)),
    )
    return BitViews(registers, mask=0x8F808F80 if exponent_bits == 2 else 0x9F009F00)


class MicroscalingFp8Gemm(TokenScaledGemm):
    """A kernel of KERNELS."""

    rows = FP8_ROWS

    def __init__(self, label: str, weight: str) -> None:
        name, variant = parse_kernel_label(label)
        number = NumberFormat.parse(weight)
        exponent_bits = number.float_type.exponent_bits
        self.tiles = TileFormat(a_grouped=False, w_exponent_bits=exponent_bits)
        # Of the kernels on warpgroup MMA only.
        costs = {c: cost for c, cost in TWO_LEVEL.costs.items() if c.only_on_hopper}
        self.choice = replace(TWO_LEVEL, few={}, costs=costs, tiles=self.tiles)
        self._views = views_of(exponent_bits)
        self.spec = KernelSpec(
            name=name,
            variant=variant,
            backend="cuda",
            weight=number,
            activation=NumberFormat.parse("fp8/row"),
            summary=f"{number.name} weights made FP8 in registers, for FP8 tensor cores",
            min_capability=(9, 0),
            max_capability=(9, 0),
            overlaps_launches=True,
            rounds_to=_TERM_BITS,
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        checked_scales(weight, self.spec.weight)
        largest, below = octaves_below(weight)
        # Halves are the numbers times 2^(bias - 15), the largest scale is 2^15.
        bias = self.spec.weight.float_type.bias
        buffers = {
            "tiles": self._tile(weight.values, bias),
            "scales": tile_blocks(scale_bytes(below)),
            "features": largest * 2.0**-bias,
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def builds(self) -> Sequence[Build]:
        """Return all builds of the usual kernel, of `[e3m2,fp8]` only the largest."""
        builds = super().builds()
        return builds if self.tiles.w_exponent_bits == 2 else builds[-1:]

    def packing(self, x: PackedOperand, config: Config | None) -> None:
        """Fused operators have no E4M3 codes."""

    def in_mma_order(self, m: int, k: int) -> bool:
        return True

    def _tile(self, values: torch.Tensor, bias: int) -> torch.Tensor:
        # Scaling by a power of two is exact, also to FP16 subnormals.
        halves = (values.float() * 2.0 ** (bias - 15)).half().view(torch.int16)
        pairs = tile_operands(halves).int() & 0xFFFF
        words_of_halves = pairs[..., 0::2] | pairs[..., 1::2] << 16
        words = self._views.words(words_of_halves.flatten(-2).unbind(-1))
        row_tiles, groups = pairs.shape[:2]
        vectors = torch.stack(words, dim=-1).view(row_tiles, groups, 32, 3, 4)
        return vectors.transpose(2, 3).contiguous().view(torch.uint8).reshape(row_tiles, groups, -1)


def tile_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Reorder scales uint8 [N, K/32] to [N/16, K/128, 32 lanes, 2]: of rows r and r + 8."""
    row_tiles, groups = -(-scales.shape[0] // MMA_ROWS), -(-scales.shape[1] // _BLOCKS)
    whole = padded(scales, row_tiles * MMA_ROWS, groups * _BLOCKS)
    split = whole.view(row_tiles, 2, 8, groups, _BLOCKS)
    return split.permute(0, 3, 2, 4, 1).reshape(row_tiles, groups, 32, 2)

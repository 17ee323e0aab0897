"""Floats with scales of blocks: MX formats, NVFP4, FP8; FP16, INT8 or FP8 activations.

`mxfp4-w4a16`, `mxfp6-w6a16` (E2M3; `[e3m2]`) and `nvfp4-w4a16` convert each weight exactly to FP16
times a power of two. E8M0 scales, powers of two, multiply the sums of 32 k in FP32; E4M3 scales
multiply the weights, exactly too. With INT8 activations, one scale per token, the sums of 32 k are
exact. `fp8-w8a16` has one scale per output feature, `[blocks]` one for 128 rows and 128 k. The
kernel is csrc/weight_only/gemm.cu, the layout is in csrc/weight_only/layout.cuh.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.cuda.bit_views import BitViews
from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.weight_only.gemm import (
    MMA_ROWS,
    STEP_K,
    WeightOnlyConfig,
    WeightOnlyGemm,
    tiles_for,
)
from flexq_bench.kernels.cuda.weight_only.minifloat import (
    FINE_MINIFLOATS,
    minifloat_configs,
    tile_minifloats,
)
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.formats.floats import FloatType
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.workloads.gemm import GemmWorkload

# Formats of weights and activations by label.
KERNELS = {
    "mxfp4-w4a16": ("mxfp4", "fp16"),
    "mxfp6-w6a16": ("mxfp6-e2m3", "fp16"),
    "mxfp6-w6a16[e3m2]": ("mxfp6-e3m2", "fp16"),
    "nvfp4-w4a16": ("nvfp4", "fp16"),
    "mxfp4-w4a8": ("mxfp4", "int8/row"),
    "mxfp6-w6a8": ("mxfp6-e2m3", "int8/row"),
    "mxfp6-w6a8[e3m2]": ("mxfp6-e3m2", "int8/row"),
    "mxfp8-w8a16": ("mxfp8", "fp16"),
    "fp8-w8a16": ("fp8/row", "fp16"),
    "fp8-w8a16[blocks]": ("fp8/128x128", "fp16"),
    "fp8-w8a8[blocks]": ("fp8/128x128", "fp8/128"),
}
_SCALES = {"fp16": 0, "e8m0": 1, "e4m3": 2, "fp32": 3}  # of csrc/weight_only/layout.cuh
_RELATIVE = 4  # E8M0 scales as halves and a factor per row
_SMALLEST = 16  # exponent of a row's largest scale, so that the factor is a normal number
_OCTAVES = 22  # between a row's scales, with which products with its numbers are exact in FP16
_LANES = 32
# For 9 to 16 tokens of codes of 4 and 6 bits: on average within 1 % of the fastest of 45 on eleven
# shapes on an H200. None spills with FP16 activations.
_SHORT, _PAIRED = WeightOnlyConfig(2, 8, 2, 1, 1, 2), WeightOnlyConfig(1, 16, 2, 1, 0, 2, 2)
_FEW_ROWS = WeightOnlyConfig(2, 8, 2, 2, 1, 2)
_USUAL, _MANY_ROWS = WeightOnlyConfig(2, 8, 2, 1, 0, 2), WeightOnlyConfig(1, 16, 2, 1, 0, 2, 8, 1)
# Two blocks split K, and two groups of warps share activations, by row tiles and warps.
_SPLIT = {
    of: WeightOnlyConfig(*of, 2, 2, 0, 2, 2, 1)
    for of in ((2, 16), (3, 8), (3, 12), (4, 8), (4, 12))
}
# Two launches share the SMs: the next one loads weights while one computes. By bits: from how many
# row tiles per SM to how many, and up to which k, a configuration is chosen without tuning.
_SHORT_K = (1.2, 1.6, 2304, WeightOnlyConfig(1, 12, 3, 2, 2, 2, 4, 1))
_OVERLAPPED = {
    4: (
        _SHORT_K,
        (1.6, 2.0, 4096, WeightOnlyConfig(1, 16, 3, 2, 2, 2, 4, 1)),
        (2.7, 4.0, 1536, WeightOnlyConfig(2, 12, 2, 1, 2, 2, 2, 1)),
    ),
    6: (_SHORT_K, (2.7, 3.5, 1536, WeightOnlyConfig(1, 14, 3, 2, 2, 2, 7, 1))),
}
_TWO_COLUMNS = (
    *(_USUAL, _SHORT, _PAIRED, _FEW_ROWS, _MANY_ROWS, *_SPLIT.values()),
    *(WeightOnlyConfig(2, warps, 2, 2, 0, 2) for warps in (6, 9)),
    WeightOnlyConfig(1, 16, 2, 1, 0, 2, 2, 1),
    WeightOnlyConfig(2, 16, 2, 2, 0, 2, 4, 1),
)
# Row tiles per SM up to which a configuration is chosen without tuning, first those for long K.
_LONG_STEPS = 24  # of 128 k
_OF_LONG_K = (
    *((2.0, _SPLIT[2, 16]), (3.0, _SPLIT[3, 12]), (4.0, _SPLIT[4, 12])),
    *((6.0, _SPLIT[3, 8]), (math.inf, _SPLIT[4, 8])),
)
_BY_TILES = (
    *((0.8, _FEW_ROWS), (1.6, _SHORT), (2.6, _PAIRED), (4.5, _USUAL)),
    # GPUs without clusters take the next of them.
    *((9.0, _SPLIT[3, 8]), (9.0, _USUAL), (math.inf, _MANY_ROWS)),
)


class MicroscalingGemm(WeightOnlyGemm):
    """A kernel of KERNELS."""

    def __init__(self, label: str, weight: str, activation: str = "fp16") -> None:
        super().__init__(label, weight, activation)
        if self.spec.weight.bits == 6:
            self.timed = FINE_MINIFLOATS

    def pack_weight(self, weight: Operand) -> PackedOperand:
        relative = relative_scales(weight) if self._has_relative_scales else None
        if relative is not None:
            tiles = self.tile(weight.values)
            blocks = tile_byte_scales(relative.halves, STEP_K // weight.group_length)
            buffers = {"tiles": torch.cat([tiles, blocks], dim=2), "scales": relative.of_rows}
            return PackedOperand(buffers, weight.rows, weight.k)
        if weight.scales is None or weight.scales.dtype != torch.float8_e4m3fn:
            return super().pack_weight(weight)
        # The kernel takes scales without a sign.
        signs = torch.where(weight.scales.float() < 0, -1, 1).repeat_interleave(
            weight.group_length, dim=1
        )
        scales = weight.scales.float().abs().to(weight.scales.dtype)
        values = weight.values * signs[:, : weight.k].to(weight.values.dtype)
        packed = super().pack_weight(replace(weight, values=values, scales=scales))
        assert weight.row_scales is not None  # of all formats with such scales
        return packed.with_buffers(scales=weight.row_scales[:, 0].float().contiguous())

    def tile(self, values: torch.Tensor) -> torch.Tensor:
        number = self.spec.weight
        if number.float_type.exponent_bits == 3:
            return tile_minifloats(values, number.bits)
        return tile_halves(values, number.float_type)

    def tile_blocks(self, weight: Operand) -> torch.Tensor:
        assert weight.scales is not None
        assert weight.block_scales is not None
        if weight.scales.dtype == torch.float32:
            return weight.block_scales
        return tile_byte_scales(weight.scales.view(torch.uint8), STEP_K // weight.group_length)

    def configs(self, col_tiles: int) -> list[WeightOnlyConfig]:
        if self._has_own_configs and col_tiles == 2:
            overlapped = _OVERLAPPED[self.spec.weight.bits]
            return [*_TWO_COLUMNS, *(config for *_, config in overlapped)]
        six = self.spec.weight.bits == 6
        return minifloat_configs(col_tiles) if six else super().configs(col_tiles)

    def default_config(self, gemm: GemmWorkload) -> WeightOnlyConfig:
        if not self._has_own_configs or tiles_for(gemm.m) != 2:
            return super().default_config(gemm)
        of_sm = gemm.n / MMA_ROWS / current_gpu().sms
        table = (*_OF_LONG_K, *_BY_TILES) if gemm.k >= _LONG_STEPS * STEP_K else _BY_TILES
        can_run = self.candidates(gemm)
        for least, most, most_k, config in _OVERLAPPED[self.spec.weight.bits]:
            if least < of_sm <= most and gemm.k <= most_k and config in can_run:
                return config
        return next((c for most, c in table if of_sm <= most and c in can_run), _USUAL)

    @property
    def _has_own_configs(self) -> bool:
        return self.block_bytes > 0 and self.spec.weight.bits < 8

    def defines(self) -> dict[str, int]:
        number = self.spec.weight
        scales = _RELATIVE if self._has_relative_scales else _SCALES[number.scale]
        own = {"SCALES": scales, "EXPONENT_BITS": number.float_type.exponent_bits}
        return super().defines() | own

    def defines_for(self, weight: PackedOperand) -> dict[str, int]:
        is_wide = self._has_relative_scales and "scales" not in weight.buffers
        return {"SCALES": _SCALES["e8m0"]} if is_wide else {}

    @property
    def _has_relative_scales(self) -> bool:
        """True if E8M0 scales are packed as halves; sums of codes stay exact without."""
        number = self.spec.weight
        return number.scale == "e8m0" and number.bits < 8 and self.spec.activation.is_dense


def tile_halves(values: torch.Tensor, kind: FloatType) -> torch.Tensor:
    """Reorder E2M1, E2M3 or E4M3 numbers [N,K] into tiles.

    The tiles of csrc/weight_only/layout.cuh are uint8 [N/16, K/128, bytes of a tile]; N and K are
    padded with zeros.
    """
    row_tiles, steps = -(-values.shape[0] // MMA_ROWS), -(-values.shape[1] // STEP_K)
    padded_values = padded(values.half(), row_tiles * MMA_ROWS, steps * STEP_K)
    # Scaling by a power of two is exact, also to FP16 subnormals.
    halves = (padded_values.float() * 2.0 ** (kind.bias - 15)).half().view(torch.int16)
    # A row is half·8 + lane_row; a k of a step is 32·vector + 8·quarter + 4·odd + 2·pair + value.
    split = halves.view(row_tiles, 2, 8, steps, 4, 4, 2, 2, 2)
    tile, half, lane_row, step, vector, quarter, odd, pair, value = range(9)
    ordered = split.permute(tile, step, lane_row, quarter, vector, odd, pair, half, value)
    registers = ordered.reshape(row_tiles, steps, _LANES, 8, 4, 2).int() & 0xFFFF
    r = registers.unbind(dim=4)
    if kind.name == "e4m3":
        pairs = [r[o] | (r[o + 1] & 0x3F80) >> 7 | (r[o + 1] & 0x8000) >> 1 for o in (0, 2)]
        planes = [_vectors(torch.stack(pairs, dim=4).flatten(3, 4))]
    elif kind.name == "e2m1":
        of_bytes = [r[o] | r[o + 1] >> 8 for o in (0, 2)]
        planes = [_vectors(of_bytes[0] | _reversed_bits(of_bytes[1].flip(-1)))]
    else:
        whole = [register[..., 0] | register[..., 1] << 16 for register in r]
        u, v, w = VIEWS.words([register[..., odd::2] for odd in (0, 1) for register in whole])
        high = torch.stack([u, v], dim=-1).flatten(-2)
        planes = [_vectors(torch.stack([x & 0xFFFF, x >> 16], dim=-1)) for x in (high, w)]
    return torch.cat(planes, dim=2)


# The registers of two MMAs with E2M3 numbers, from their three words.
VIEWS = BitViews(
    (
        *(((0, 9), (2, 3)), ((1, 13), (0, 9)), ((1, 21), (2, 7)), ((1, 0), (2, 7))),
        *(((0, 28), (2, 29)), ((1, 13), (0, 19)), ((1, 23), (0, 0)), ((2, 0),)),
    ),
    mask=0x8F808F80,
    rotates=True,
)


def _reversed_bits(halves: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the 16 bits of integers."""
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        halves = (halves & mask) << shift | halves >> shift & mask
    return halves


class RelativeScales(NamedTuple):
    """E8M0 scales as the upper bytes of halves, uint8 [N, K/group], and a factor, FP32 [N]."""

    halves: torch.Tensor
    of_rows: torch.Tensor


def relative_scales(weight: Operand) -> RelativeScales | None:
    """Divide scales by the largest one of their row, which becomes 2^15; None: a row's differ more
    than halves allow, or one is no number."""
    largest, below = octaves_below(weight)
    if bool((below > _OCTAVES).any() | largest.isnan().any()):
        return None
    return RelativeScales(scale_bytes(below), largest * 2.0**-15)


def octaves_below(weight: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest E8M0 scale of each row, FP32 [N], and how far the others are below it.

    At least 2^-111; NaN: one is no number. Octaves, int32 [N, K/group], are 0 for zeros.
    """
    assert weight.scales is not None
    exponents = weight.scales.view(torch.uint8).int()
    group = weight.group_length
    blocks = padded(weight.values.half(), weight.rows, exponents.shape[1] * group)
    is_used = (blocks.view(*exponents.shape, group) != 0).any(dim=2)
    most = torch.where(is_used, exponents, 0).amax(dim=1, keepdim=True).clamp(min=_SMALLEST)
    below = torch.where(is_used, most - exponents, 0)
    largest = (most[:, 0] << 23).view(torch.float32)
    return largest.masked_fill((exponents == 255).any(dim=1), torch.nan), below


def scale_bytes(below: torch.Tensor) -> torch.Tensor:
    """Return 2^(15 - below), or the smallest normal number, as upper bytes of halves."""
    return ((30 - below).clamp(min=1) * 4).to(torch.uint8)


def _vectors(word_halves: torch.Tensor) -> torch.Tensor:
    """Reorder the halves of words [tiles, steps, 32 lanes, words, 2] to vectors of 16 bytes."""
    tiles, steps, lanes, words, _ = word_halves.shape
    halves = word_halves.to(torch.int16).view(tiles, steps, lanes, words // 4, 8)
    return halves.transpose(2, 3).reshape(tiles, steps, -1).view(torch.uint8)


def tile_byte_scales(scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """Reorder scales of one byte, uint8 [N, K/group], to [N/16, K/128, bytes of a tile].

    blocks: groups of a tile, 4 or 8; csrc/weight_only/layout.cuh has the orders.
    """
    row_tiles, steps = -(-scales.shape[0] // MMA_ROWS), -(-scales.shape[1] // blocks)
    whole = padded(scales, row_tiles * MMA_ROWS, steps * blocks)
    split = whole.view(row_tiles, 2, 8, steps, 4, blocks // 4)
    tile, half, lane_row, step, vector, part = range(6)
    return split.permute(tile, step, lane_row, part, half, vector).reshape(row_tiles, steps, -1)

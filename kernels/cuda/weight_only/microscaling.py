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

import torch

from flexq_bench.kernels.contract import PackedOperand
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
_LANES = 32
# For 9 to 16 tokens of codes of 4 and 6 bits: on average within 0.6 % of the best of 51 on six
# shapes on an H200 (`benchmarks/kernels/candidates.py`). None spills.
_SHORT, _PAIRED = WeightOnlyConfig(2, 8, 2, 1, 1, 2), WeightOnlyConfig(1, 16, 2, 1, 0, 2, 2)
_USUAL, _SPLIT = WeightOnlyConfig(2, 8, 2, 1, 0, 2), WeightOnlyConfig(4, 4, 3, 2, 0, 2)
_MANY_ROWS, _LONG_K = WeightOnlyConfig(2, 4, 2, 1, 0, 2), WeightOnlyConfig(4, 8, 3, 1, 0, 2)
_TWO_COLUMNS = (
    *(_USUAL, _SHORT, _PAIRED, _SPLIT, _MANY_ROWS, _LONG_K),
    WeightOnlyConfig(3, 8, 2, 1, 0, 2),
    WeightOnlyConfig(1, 8, 3, 1, 0, 2, 2),
    WeightOnlyConfig(2, 16, 2, 1, 0, 2, 2),
)
_LONG_STEPS = 64  # of 128 k
# Row tiles per SM up to which a configuration is chosen without tuning, if K is not long.
_BY_TILES = ((1.6, _SHORT), (2.6, _PAIRED), (4.5, _USUAL), (9.0, _SPLIT), (math.inf, _MANY_ROWS))


class MicroscalingGemm(WeightOnlyGemm):
    """A kernel of KERNELS. in_bytes: weights are in the order IN_BYTES of the layout; on_operands:
    E8M0 scales multiply operands, as halves."""

    in_bytes = False
    on_operands = False

    def __init__(self, label: str, weight: str, activation: str = "fp16") -> None:
        super().__init__(label, weight, activation)
        if self.spec.weight.bits == 6:
            self.timed = FINE_MINIFLOATS

    def pack_weight(self, weight: Operand) -> PackedOperand:
        if self.on_operands:
            assert weight.scales is not None
            halves, of_rows = relative_scales(weight.scales, weight.values, weight.group_length)
            tiles = self.tile(weight.values)
            blocks = tile_byte_scales(halves, STEP_K // weight.group_length)
            buffers = {"tiles": torch.cat([tiles, blocks], dim=2), "scales": of_rows}
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
        return tile_halves(values, number.float_type, in_bytes=self.in_bytes)

    def tile_blocks(self, weight: Operand) -> torch.Tensor:
        assert weight.scales is not None
        assert weight.block_scales is not None
        if weight.scales.dtype == torch.float32:
            return weight.block_scales
        return tile_byte_scales(weight.scales.view(torch.uint8), STEP_K // weight.group_length)

    def configs(self, col_tiles: int) -> list[WeightOnlyConfig]:
        if self._has_own_configs and col_tiles == 2:
            return list(_TWO_COLUMNS)
        six = self.spec.weight.bits == 6
        return minifloat_configs(col_tiles) if six else super().configs(col_tiles)

    def default_config(self, gemm: GemmWorkload) -> WeightOnlyConfig:
        if not self._has_own_configs or tiles_for(gemm.m) != 2:
            return super().default_config(gemm)
        of_sm = gemm.n / MMA_ROWS / current_gpu().sms
        chosen = next(config for most, config in _BY_TILES if of_sm <= most)
        if gemm.k >= _LONG_STEPS * STEP_K:
            chosen = _LONG_K
        return chosen if chosen in self.candidates(gemm) else _USUAL

    @property
    def _has_own_configs(self) -> bool:
        return self.block_bytes > 0 and self.spec.weight.bits < 8

    def defines(self) -> dict[str, int]:
        number = self.spec.weight
        scales = 4 if self.on_operands else _SCALES[number.scale]
        own = {"SCALES": scales, "EXPONENT_BITS": number.float_type.exponent_bits}
        return super().defines() | own | ({"IN_BYTES": 1} if self.in_bytes else {})


def tile_halves(values: torch.Tensor, kind: FloatType, *, in_bytes: bool = False) -> torch.Tensor:
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
    elif kind.name == "e2m1" and in_bytes:
        of_bytes = [r[o] | r[o + 1] >> 8 for o in (0, 2)]
        planes = [_vectors(of_bytes[0] | _reversed_bits(of_bytes[1].flip(-1)))]
    elif kind.name == "e2m1":
        word_halves = r[0] | r[1] >> 3
        word_halves |= (r[2] & 0x0E00) >> 9 | (r[2] & 0x8000) >> 2
        word_halves |= (r[3] & 0x0E00) >> 6 | (r[3] & 0x8000) >> 1
        planes = [_vectors(word_halves)]
    elif in_bytes:
        whole = [register[..., 0] | register[..., 1] << 16 for register in r]
        of_pairs = [register[..., odd::2] for odd in (0, 1) for register in whole]
        u, v, w = _solved(of_pairs)
        high = torch.stack([u, v], dim=-1).flatten(-2)
        planes = [_vectors(torch.stack([x & 0xFFFF, x >> 16], dim=-1)) for x in (high, w)]
    else:
        nibbles = [(register & 0x0F00) >> 8 << 4 * o for o, register in enumerate(r)]
        high = nibbles[0] | nibbles[1] | nibbles[2] | nibbles[3]
        ends = [(register & 0x8080) >> o for o, register in enumerate(r)]
        of_mma = ends[0] | ends[1] | ends[2] | ends[3]
        low = of_mma[..., 0::2, :] | of_mma[..., 1::2, :] >> 4
        planes = [_vectors(high), _vectors(low)]
    return torch.cat(planes, dim=2)


# Each register of two MMAs, in the words u, v and w of a lane (0, 1, 2), each rotated to the left: their sum
# modulo 2. An invertible map of 96 bits.
_VIEWS = (
    ((0, 9), (2, 3)),
    ((1, 13), (0, 9)),
    ((1, 21), (2, 7)),
    ((1, 0), (2, 7)),
    ((0, 28), (2, 29)),
    ((1, 13), (0, 19)),
    ((1, 23), (0, 0)),
    ((2, 0),),
)
_E2M3_BITS = [p for p in range(32) if 0x8F808F80 >> p & 1]


def _inverse() -> list[int]:
    """Words u, v, w as one integer for each bit of the eight registers."""
    rows = []
    for n, views in enumerate(_VIEWS):
        for p in _E2M3_BITS:
            sources = 0
            for word, rotation in views:
                sources ^= 1 << (32 * word + (p - rotation) % 32)
            rows.append([sources, 1 << len(rows)])
    for column in range(96):
        pivot = next(i for i in range(column, 96) if rows[i][0] >> column & 1)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(96):
            if i != column and rows[i][0] >> column & 1:
                rows[i] = [a ^ b for a, b in zip(rows[i], rows[column], strict=True)]
    return [sum((rows[c][1] >> bit & 1) << c for c in range(96)) for bit in range(96)]


def _solved(registers: list[torch.Tensor]) -> list[torch.Tensor]:
    words = [torch.zeros_like(registers[0]) for _ in range(3)]
    bits = iter(_inverse())
    for register in registers:
        for p in _E2M3_BITS:
            column, bit = next(bits), -(register >> p & 1)
            for i in range(3):
                mask = column >> 32 * i & 0xFFFFFFFF
                if mask:
                    words[i] ^= bit & (mask - (mask >> 31 << 32))
    return [word.long() & 0xFFFFFFFF for word in words]


def _reversed_bits(halves: torch.Tensor) -> torch.Tensor:
    """Reverse the order of the 16 bits of integers."""
    for shift, mask in ((8, 0x00FF), (4, 0x0F0F), (2, 0x3333), (1, 0x5555)):
        halves = (halves & mask) << shift | halves >> shift & mask
    return halves


def relative_scales(
    scales: torch.Tensor, values: torch.Tensor, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split E8M0 scales [N, K/group] into halves' upper bytes and a factor per row, FP32 [N].

    Scales of blocks of zeros count as the row's largest.
    """
    exponents = scales.view(torch.uint8).int()
    blocks = padded(values.half(), values.shape[0], scales.shape[1] * group)
    used = (blocks.view(*scales.shape, group) != 0).any(dim=2)
    most = torch.where(used, exponents, 0).amax(dim=1, keepdim=True)
    below = torch.where(used, most - exponents, 0)
    return ((30 - below) * 4).to(torch.uint8), torch.ldexp(
        torch.ones_like(most[:, 0], dtype=torch.float32), most[:, 0] - 142
    )


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

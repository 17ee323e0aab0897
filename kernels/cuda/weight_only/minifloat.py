"""FP6 and FP5 weights, FP16 activations: ZeroQuant(4+2)'s kernels (arXiv 2312.08583).

`fp6-w6a16` has E3M2 weights, `fp5-w5a16` E3M1, with one scale per output feature; `[fine]` has one
per 128 k. Bit operations convert a weight to FP16 times 2^-12, which its scale compensates (the
paper's bias shift); `[-bias-shift]` converts every weight to its own value. The kernel is
csrc/weight_only/gemm.cu, the layout of weights is in csrc/weight_only/layout.cuh.
"""

from __future__ import annotations

import torch

from flexq_bench.kernels.cuda.cublas.dense import padded
from flexq_bench.kernels.cuda.timed_choice import TimedChoice
from flexq_bench.kernels.cuda.weight_only.gemm import (
    MMA_ROWS,
    STEP_K,
    Choice,
    WeightOnlyConfig,
    WeightOnlyGemm,
)
from flexq_bench.workloads.case import kernel_label

MINIFLOATS = TimedChoice("minifloats")
FINE_MINIFLOATS = TimedChoice("fine-minifloats")  # a scale per 128 k
VARIANTS = {6: ("", "fine", "-bias-shift"), 5: ("", "fine")}  # by the bits of weights
_LANES, _QUADS = 32, 16  # of a tile; a quad is four weights of a lane
# Bits of the four weights of a quad: exponent and upper mantissa bit; sign.
_UPPER, _SIGN = 0x1E1E1E1E, 0x80808080
_ENDS = 0x81818181  # sign and lower mantissa bit


# (row_tiles, warps, stages, k_split, late) by column tiles: a greedy selection from 62 (20, 10)
# (`benchmarks/kernels/heuristic.py select`), on average within 0.2 % of the best of them on the
# random shapes of examples/h200/fp6-times.json.gz.
_CHOICES: dict[int, tuple[Choice, ...]] = {
    1: (
        (1, 8, 2, 1, 0),
        (1, 8, 2, 1, 1),
        (1, 16, 2, 1, 1),
        (2, 4, 2, 1, 0),
        (2, 4, 2, 1, 1),
        (2, 8, 2, 1, 0),
        (2, 8, 2, 1, 1),
        (2, 8, 2, 2, 0),
        (2, 16, 2, 1, 0),
        (2, 16, 2, 1, 1),
        (2, 16, 3, 1, 0),
        (3, 8, 2, 1, 0),
        (3, 16, 2, 1, 0),
        (4, 8, 2, 1, 0),
        (4, 8, 2, 1, 1),
        (4, 8, 3, 1, 0),
        (5, 8, 2, 1, 0),
        (5, 8, 2, 2, 1),
    ),
    2: ((1, 8, 2, 1, 0), (2, 4, 2, 1, 0), (2, 8, 2, 1, 0), (2, 8, 3, 1, 0), (3, 4, 2, 1, 0)),
    4: ((1, 8, 2, 1, 0), (2, 4, 2, 1, 0), (2, 4, 2, 2, 0), (2, 8, 2, 1, 1)),
}


def minifloat_configs(col_tiles: int) -> list[WeightOnlyConfig]:
    """Return the configurations for weights in two planes, for any GPU."""
    return [WeightOnlyConfig(*choice, col_tiles) for choice in _CHOICES[col_tiles]]


class MinifloatGemm(WeightOnlyGemm):
    """`fp6-w6a16` and `fp5-w5a16` with their variants."""

    def __init__(self, bits: int, variant: str = "") -> None:
        weight = f"fp{bits}/{STEP_K if variant == 'fine' else 'row'}"
        super().__init__(kernel_label(f"fp{bits}-w{bits}a16", variant), weight)
        self.timed = FINE_MINIFLOATS if variant == "fine" else MINIFLOATS

    def tile(self, values: torch.Tensor) -> torch.Tensor:
        return tile_minifloats(values, self.spec.weight.bits)

    def configs(self, col_tiles: int) -> list[WeightOnlyConfig]:
        return minifloat_configs(col_tiles)

    def defines(self) -> dict[str, int]:
        shifted = self.spec.variant != "-bias-shift"
        return super().defines() | {"BIAS_SHIFT": int(shifted)}


def tile_minifloats(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Reorder E3M2 (6 bits) or E3M1 (5) numbers FP16 [N,K] into tiles.

    The tiles of csrc/weight_only/layout.cuh are uint8 [N/16, K/128, bytes of a tile]; N and K are
    padded with zeros.
    """
    row_tiles, steps = -(-values.shape[0] // MMA_ROWS), -(-values.shape[1] // STEP_K)
    padded_values = padded(values, row_tiles * MMA_ROWS, steps * STEP_K)
    # Scaling by a power of two is exact, also to FP16 subnormals: the upper byte becomes s00eeemm.
    upper_bytes = (padded_values.float() * 2.0**-12).half().view(torch.int16) >> 8 & 0xFF
    # A row is half·8 + lane_row; a k of a step is 32·vector + 8·quarter + 4·odd + 2·pair + value.
    split = upper_bytes.view(row_tiles, 2, 8, steps, 4, 4, 2, 2, 2)
    tile, half, lane_row, step, vector, quarter, odd, pair, value = range(9)
    ordered = split.permute(tile, step, lane_row, quarter, vector, odd, half, value, pair)
    quad_bytes = ordered.reshape(row_tiles, steps, _LANES, _QUADS, 4).long()
    quads = (
        quad_bytes[..., 0]
        | quad_bytes[..., 1] << 8
        | quad_bytes[..., 2] << 16
        | quad_bytes[..., 3] << 24
    )
    upper = quads & _UPPER
    high = upper[..., 0::2] | _rotated_left(upper[..., 1::2], 4)
    if bits == 6:
        fields = (quads & _ENDS).view(row_tiles, steps, _LANES, 4, 4)
        rotated = [_rotated_left(fields[..., f], 2 * f) for f in range(4)]
    else:
        fields = (quads & _SIGN).view(row_tiles, steps, _LANES, 2, 8)
        rotated = [fields[..., f] >> f for f in range(8)]
    low = torch.stack(rotated).sum(dim=0)  # their set bits are disjoint
    vectors = high.view(row_tiles, steps, _LANES, 2, 4).transpose(2, 3)
    planes = [plane.reshape(row_tiles, steps, -1).to(torch.int32) for plane in (vectors, low)]
    return torch.cat(planes, dim=2).view(torch.uint8)


def _rotated_left(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Rotate 32-bit words, stored as int64."""
    return (words << bits | words >> (32 - bits)) & 0xFFFFFFFF

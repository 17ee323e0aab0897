"""Atom's W4A4 (arXiv 2310.19102): INT4 groups of weights and activations, outlier channels in INT8.

Channels with outliers in calibration are moved to the end of K: they are the last group, which has
8 bits. One kernel reorders and quantizes activations; the GEMM scales the sums of every group. GPUs
with an int4 tensor core (compute capability 8.0 to 8.9) use it. Later ones have none: codes are
converted to int8 in registers. `[int4-mma]` measures the emulated instruction instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexq_bench.kernels.contract import KernelSpec, PackedOperand, checked_scales
from flexq_bench.kernels.cuda.imma.configuration_choice import ATOM
from flexq_bench.kernels.cuda.imma.configurations import GROUP, AnyImmaConfig, TileFormat
from flexq_bench.kernels.cuda.imma.four_bit import tile_nibbles
from flexq_bench.kernels.cuda.imma.gemm import ImmaGemm
from flexq_bench.kernels.cuda.weight_only.gemm import tile_scales
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.mixed import ACTIVATION_CLIP, default_order, order_of, tail_start
from flexq_bench.kernels.runtime.nvrtc import Build

VARIANTS = ("", "int4-mma")
_FORMAT = NumberFormat(4, GROUP, kind="mixed")


class MixedGemm(ImmaGemm):
    """`atom-w4a4`. Activations are read in the channel order of the weights."""

    choice = ATOM

    def __init__(self, variant: str = "") -> None:
        emulated = variant == "int4-mma"
        self.tiles = TileFormat(_FORMAT.bits, int8_tail=True, int4_mma=emulated)
        self.spec = KernelSpec(
            name="atom-w4a4",
            variant=variant,
            backend="cuda",
            weight=_FORMAT,
            activation=replace(_FORMAT, clip=ACTIVATION_CLIP),
            version=2,  # 2: activations are clipped
            summary="Atom: INT4 groups, the last one INT8, channels reordered"
            + (", by an int4 MMA that is emulated" if emulated else ""),
            min_capability=(9, 0) if emulated else (8, 0),
            overlaps_launches=True,
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        start = tail_start(weight.k)
        head, tail = weight.values[:, :start], weight.values[:, start:]
        # A code of 8 bits is 16·a + b + 8, a and b in -8 … 7: one tile has a, the next has b.
        tail = torch.nn.functional.pad(tail, (0, -tail.shape[1] % GROUP))
        nibbles = torch.cat([head, tail >> 4, (tail & 15) ^ 8], dim=1)
        scales_of_tiles = torch.cat([scales, scales[:, -1:]], dim=1)
        buffers = {
            "tiles": tile_nibbles(nibbles),
            "scales": tile_scales(scales_of_tiles),
            "order": order_of(weight),
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        return super().empty_activation(m, k, device).with_buffers(order=default_order(k, device))

    def for_weights(self, packed: PackedOperand, w: PackedOperand) -> PackedOperand:
        return packed.with_buffers(order=w.buffers["order"])

    def every_config(self) -> Sequence[AnyImmaConfig]:
        # Where int4 MMA is not emulated, builds of both variants have the same code.
        return self.choice.for_few(1, GROUP)[-1:] if self.tiles.int4_mma else super().every_config()

    def in_mma_order(self, m: int, k: int) -> bool:
        return not self.tiles.int4_mma and super().in_mma_order(m, k)

    def packing_builds(self) -> Sequence[Build]:
        return [Build.of("imma/pack.cu", A_BITS=4, INT8_TAIL=1, W_BITS=4)]

"""DGQ's W4A8 (arXiv 2310.04836): 4-bit codes times integer group scales are int8 weights.

Sums are integers over all of K, scaled once. csrc/imma/group_gemm*.cu dequantize weights to int8 in
registers. For hundreds of tokens they may instead be dequantized once per launch, to temporary
memory, for cuBLASLt's int8 GEMM: the same integers, in another order of k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import Config, GemmCall, KernelSpec, PackedOperand, checked_scales
from flexq_bench.kernels.cuda.cublas import cublaslt
from flexq_bench.kernels.cuda.cublas.dense import INT8, padded
from flexq_bench.kernels.cuda.cublas.rows import INT8_ROWS
from flexq_bench.kernels.cuda.imma.configuration_choice import DUAL_GRAINED
from flexq_bench.kernels.cuda.imma.configurations import GROUP, MMA_ROWS, TileFormat
from flexq_bench.kernels.cuda.imma.four_bit import BITS, TokenScaledGemm, tile_nibbles
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.formats.dual_grained import int8_values
from flexq_bench.kernels.formats.symmetric_quantization import STATIC_SCALE, quantize_static
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.workloads.gemm import GemmWorkload

_LONGEST_K = (2**31 - 1) // 2**14  # number of products of int8 codes whose sum fits int32
_MIN_WIDENED = 256  # tokens; for fewer, writing and reading int8 weights takes too long
_WIDEN = Build.of("imma/widen.cu")
_WIDEN_WARPS = 8  # of a block of widen_weights, one tile each


@dataclass(frozen=True, slots=True)
class WidenedConfig(Config):
    """Weights are dequantized to int8 in memory. algorithm: index in cuBLASLt's heuristic list."""

    algorithm: int


class DualGrainedGemm(TokenScaledGemm):
    """`dgq-w4a8`, and `[static]` with one scale for all activations.

    `pack_weight` raises ShapeError for weights that exceed int8 when multiplied by their scale.
    """

    tiles = TileFormat(BITS, dual_grained=True, a_grouped=False)
    choice = DUAL_GRAINED

    def __init__(self, variant: str = "") -> None:
        self.spec = KernelSpec(
            name="dgq-w4a8",
            variant=variant,
            backend="cuda",
            weight=NumberFormat(BITS, GROUP, kind="dual"),
            activation=NumberFormat(8, block_rows=None if variant else 1),
            summary="DGQ: 4-bit weights made int8 with their group's scale, one integer sum over K"
            + (", activations with one static scale" if variant else ""),
            overlaps_launches=True,
        )

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return quantize_static(x, 8) if self.spec.variant else super().quantize_activation(x)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        """Allocate the buffers. `[static]` has a scale, unless the weights have one."""
        packed = super().empty_activation(m, k, device)
        if not self.spec.variant:
            return packed
        static = torch.full((1,), STATIC_SCALE, dtype=torch.float32, device=device)
        return packed.with_buffers(static=static)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        int8_values(weight)
        check_longest_k(self.spec, weight.k, "group-w4a8")
        assert weight.zero_points is not None  # checked by int8_values
        assert weight.row_scales is not None  # checked by checked_scales
        # Past K weights are zero: their code is minus the zero point.
        zeros = weight.zero_points[:, -1:].to(torch.int8)
        past = (-zeros).expand(-1, -weight.k % GROUP)
        pairs = torch.stack([scales.to(torch.int8), weight.zero_points], dim=2)
        buffers = {
            "tiles": tile_nibbles(torch.cat([weight.values, past], dim=1)),
            "scales": tile_pairs(pairs),
            "features": weight.row_scales[:, 0].contiguous(),
        }
        return PackedOperand(buffers, weight.rows, weight.k)

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return [*super().candidates(gemm), *self._widened(gemm)]

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        if not isinstance(config, WidenedConfig):
            super().compute(call, config)
            return
        tiles = w.buffers["tiles"]
        row_tiles, steps, _ = tiles.shape
        codes = torch.empty(shape.n, steps * GROUP, dtype=torch.int8, device=out.device)
        load_function(_WIDEN, "widen_weights").launch(
            (-(-steps // _WIDEN_WARPS), row_tiles, 1),
            _WIDEN_WARPS * 32,
            (
                tiles,
                w.buffers["scales"],
                codes,
                shape.n,
                steps,
                int(self.in_mma_order(shape.m, shape.k)),
            ),
            overlap_previous=True,
        )
        sums = torch.empty(shape.m, shape.n, dtype=torch.int32, device=out.device)
        device = torch.cuda.current_device()
        problem = cublaslt.lt_problem(shape.m, shape.n, codes.shape[1], INT8, device)
        problem.run(codes, x.buffers["codes"], sums, config.algorithm)
        INT8_ROWS.scale(sums, x.buffers["scales"], w.buffers["features"], bias, out)

    def builds(self) -> Sequence[Build]:
        return [*super().builds(), _WIDEN]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        if isinstance(config, WidenedConfig):
            return [*self.packing_builds(), _WIDEN]
        return super().builds_for(gemm, config)

    def _widened(self, gemm: GemmWorkload) -> list[WidenedConfig]:
        if gemm.m < _MIN_WIDENED:
            return []
        k_padded = -(-gemm.k // GROUP) * GROUP
        known = cublaslt.lt_candidates(gemm, k_padded, INT8)
        return [WidenedConfig(config.algorithm) for config in known]


def check_longest_k(spec: KernelSpec, k: int, instead: str) -> None:
    """Raise ShapeError if sums over all of K might overflow int32. instead: a kernel that fits."""
    if k > _LONGEST_K:
        raise ShapeError(
            f"{spec.label} sums in int32, so K may be at most {_LONGEST_K:,}, got "
            f"{k:,}: pick {instead}, or split the layer along K"
        )


def tile_pairs(pairs: torch.Tensor) -> torch.Tensor:
    """Reorder int8 pairs [N, K/128, 2] to [N/16, K/128, 8, 2, 2]: rows r and r + 8 adjacent."""
    rows, groups, _ = pairs.shape
    row_tiles = -(-rows // MMA_ROWS)
    whole = padded(pairs.reshape(rows, -1), row_tiles * MMA_ROWS, groups * 2)
    return whole.view(row_tiles, 2, 8, groups, 2).permute(0, 3, 2, 1, 4).contiguous()

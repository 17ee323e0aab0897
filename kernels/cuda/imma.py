"""FlexQ's numbers on int8 tensor cores: 6-bit weights, widened in registers (csrc/flexq_imma.cu).

Not of the paper: the same quantized operands as `flexq-w6a6` and `flexq-w6a8` and the same exact
integer sums, on the tensor core that every GPU from Ampere to Blackwell has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from kernels.contract import (
    Config,
    KernelSpec,
    LinearKernel,
    OperandFormat,
    PackedOperand,
    check_gemm,
    checked_scales,
)
from kernels.formats import Operand
from kernels.runtime.module import current_arch, load_function, shared_memory_limit
from kernels.runtime.nvrtc import Build
from workloads.gemm import GemmWorkload

GROUP = 128
W_BITS = 6
MMA_ROWS, MMA_TOKENS = 16, 8
TILE_BYTES = 1536  # imma_layout.cuh: 16 rows by 128 k
SHARE_BYTES = 16 * 32  # a warp's sums of 16 rows and 8 tokens
COL_TILES = (1, 2, 4)  # of 8 tokens, in one block; more tokens are further blocks


@dataclass(frozen=True, slots=True)
class ImmaConfig(Config):
    """row_tiles: of 16 rows a block; warps: ways to split K in a block; stages of each warp's
    ring; k_split: blocks of a cluster that share a row tile; col_tiles: of 8 tokens a block."""

    row_tiles: int
    warps: int
    stages: int
    k_split: int
    col_tiles: int

    @property
    def build(self) -> Build:
        """How csrc/flexq_imma.cu is compiled for this configuration."""
        defines = {name.upper(): value for name, value in asdict(self).items()}
        return Build.of("flexq_imma.cu", min_sm=90 if self.k_split > 1 else 80, **defines)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as csrc/flexq_imma.cu lays it out."""
        reduction = self.warps * self.row_tiles * self.col_tiles * SHARE_BYTES
        return max(reduction, self.warps * self.stages * self.row_tiles * TILE_BYTES)


# (row_tiles, warps, stages, k_split): those of all (1, 2, 4) x (4, 8, 16) x (2, 3, 4) x (1, 2, 4)
# that were among the three fastest of some layer on an H200.
_CHOICES = (
    (1, 4, 2, 1),
    (1, 4, 3, 1),
    (1, 4, 4, 1),
    (1, 8, 2, 1),
    (1, 8, 3, 1),
    (1, 16, 2, 1),
    (1, 16, 3, 1),
    (2, 4, 2, 1),
    (2, 4, 3, 1),
    (2, 4, 4, 1),
    (2, 8, 2, 1),
    (2, 8, 3, 1),
    (2, 8, 4, 1),
    (2, 16, 2, 1),
    (2, 16, 3, 1),
    (4, 8, 2, 1),
    (4, 8, 3, 1),
    (1, 4, 2, 2),
    (2, 4, 2, 2),
    (2, 8, 2, 2),
    (2, 4, 2, 4),
)


class Int8TensorCoreGemm(LinearKernel):
    """`flexq-imma-w6a<a_bits>`."""

    def __init__(self, a_bits: int) -> None:
        self.spec = KernelSpec(
            name=f"flexq-imma-w6a{a_bits}",
            backend="cuda",
            weight=OperandFormat(W_BITS, GROUP),
            activation=OperandFormat(a_bits, GROUP),
            summary=f"FlexQ W6A{a_bits} on int8 tensor cores, weights widened in registers",
        )
        self._packing = Build.of("imma_pack.cu", A_BITS=a_bits)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        steps, row_tiles = -(-weight.k // GROUP), -(-weight.rows // MMA_ROWS)
        device = weight.values.device
        tiles = torch.empty(row_tiles, steps, TILE_BYTES, dtype=torch.uint8, device=device)
        tile_scales = torch.empty(row_tiles, steps, 8, 2, dtype=torch.float16, device=device)
        arguments = (weight.values.contiguous(), scales.contiguous(), tiles, tile_scales)
        load_function(self._packing, "pack_weights").launch(
            (steps, row_tiles, 1),
            32,
            (*arguments, weight.rows, weight.k),
        )
        return PackedOperand({"tiles": tiles, "scales": tile_scales}, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        steps = -(-k // GROUP)
        m_padded = -(-m // MMA_TOKENS) * MMA_TOKENS
        buffers = {
            "codes": torch.zeros(m, steps * GROUP, dtype=torch.int8, device=device),
            "scales": torch.zeros(steps, m_padded, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        packed.buffers["codes"][:, : x.k] = x.values
        packed.buffers["scales"][:, : x.rows] = checked_scales(x, self.spec.activation).T
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        codes, scales = packed.buffers["codes"], packed.buffers["scales"]
        load_function(self._packing, "quantize_rows").launch(
            (scales.shape[0], scales.shape[1], 1),
            32,
            (x.contiguous(), codes, scales, packed.rows, packed.k),
            overlap_previous=True,
        )

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        shape = check_gemm(x, w, out)
        c = config if isinstance(config, ImmaConfig) else self.default_config(shape)
        blocks = -(-shape.n // (MMA_ROWS * c.row_tiles)) * c.k_split
        chunks = -(-shape.m // (c.col_tiles * MMA_TOKENS))
        load_function(c.build, "flexq_imma").launch(
            (blocks, chunks, 1),
            c.warps * 32,
            (
                w.buffers["tiles"],
                w.buffers["scales"],
                x.buffers["codes"],
                x.buffers["scales"],
                bias,
                out,
                shape.m,
                shape.n,
                shape.k,
            ),
            shared_bytes=c.shared_bytes,
            overlap_previous=True,
            cluster=c.k_split,
        )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        device = torch.cuda.current_device()
        allowed, arch = shared_memory_limit(device), current_arch(device)
        configs = _configs(_col_tiles(gemm.m))
        return [c for c in configs if c.shared_bytes <= allowed and c.build.runs_on(arch)]

    def default_config(self, gemm: GemmWorkload) -> ImmaConfig:
        return ImmaConfig(row_tiles=1, warps=8, stages=4, k_split=1, col_tiles=_col_tiles(gemm.m))

    def builds(self) -> Sequence[Build]:
        return [self._packing, *(c.build for tiles in COL_TILES for c in _configs(tiles))]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config if isinstance(config, ImmaConfig) else self.default_config(gemm)
        return [self._packing, chosen.build]


def _col_tiles(m: int) -> int:
    return next((tiles for tiles in COL_TILES if m <= tiles * MMA_TOKENS), COL_TILES[-1])


def _configs(col_tiles: int) -> list[ImmaConfig]:
    """Those that don't spill: the sums of many tokens need more than a 16th of the registers."""
    configs = [ImmaConfig(*choice, col_tiles) for choice in _CHOICES]
    if col_tiles == 1:
        return configs
    few_warps = [c for c in configs if c.row_tiles <= 2]
    return [c for c in few_warps if col_tiles == 2 or c.warps <= 8]

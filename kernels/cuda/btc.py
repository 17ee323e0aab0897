"""FlexQ W6A6 and W6A8 on binary tensor cores (arXiv 2508.04405, sections 4.1 to 4.3).

Bit planes of weights and activations are packed on the GPU; csrc/flexq_btc.cu says how they lie in
memory and how they are multiplied.
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
from kernels.runtime.module import load_function, shared_memory_limit
from kernels.runtime.nvrtc import Build
from workloads.gemm import GemmWorkload

GROUP = 128
W_BITS = 6
MMA_ROWS, MMA_COLS = 16, 8
MAX_TOKENS = 8  # of one block; more tokens are further blocks, which find the weights in L2


@dataclass(frozen=True, slots=True)
class BtcConfig(Config):
    """row_tiles: 16-row tiles a block; warps: ways to split K in a block; stages: of cp.async."""

    row_tiles: int
    warps: int
    stages: int

    def build(self, a_bits: int, tokens: int) -> Build:
        """How csrc/flexq_btc.cu is compiled for this configuration and 1 to 8 tokens a block."""
        defines = {name.upper(): value for name, value in asdict(self).items()}
        return Build.of("flexq_btc.cu", A_BITS=a_bits, TOKENS=tokens, **defines)

    def shared_bytes(self, a_bits: int, tokens: int) -> int:
        """Dynamic shared memory of a block, as csrc/flexq_btc.cu lays it out."""
        stage = self.row_tiles * (W_BITS * MMA_ROWS * 16 + MMA_ROWS * 2)
        column_tiles = -(-tokens * a_bits // MMA_COLS)
        reduction = self.warps * self.row_tiles * MMA_ROWS * (column_tiles * 4 + 1) * 4
        return max(self.warps * self.stages * stage, reduction)


# Those of all (1, 2) x (4, 8, 16) x (3, 4, 6) that were among the three fastest of some shape.
_CONFIGS = tuple(
    BtcConfig(*choice)
    for choice in (
        (1, 4, 3),
        (1, 4, 4),
        (1, 8, 3),
        (1, 8, 4),
        (1, 16, 3),
        (1, 16, 4),
        (2, 4, 3),
        (2, 4, 4),
        (2, 8, 3),
        (2, 8, 4),
        (2, 16, 3),
        (2, 16, 4),
    )
)


class BinaryTensorCoreGemm(LinearKernel):
    """`flexq-w6a<a_bits>`."""

    def __init__(self, a_bits: int) -> None:
        self.spec = KernelSpec(
            name=f"flexq-w6a{a_bits}",
            backend="cuda",
            weight=OperandFormat(W_BITS, GROUP),
            activation=OperandFormat(a_bits, GROUP),
            summary=f"FlexQ W6A{a_bits} on binary tensor cores",
            # Blackwell emulates binary MMA with int8.
            max_capability=(9, 0),
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        steps, tiles = -(-weight.k // GROUP), -(-weight.rows // MMA_ROWS)
        device = weight.values.device
        planes = torch.empty(steps, tiles, W_BITS, MMA_ROWS, 4, dtype=torch.int32, device=device)
        codes = weight.values.contiguous()
        function = load_function(Build.of("flexq_pack.cu", BITS=W_BITS), "pack_weights")
        function.launch((steps, tiles, 1), 32 * MMA_ROWS, (codes, planes, weight.rows, weight.k))
        padded = torch.zeros(steps, tiles * MMA_ROWS, dtype=torch.float16, device=device)
        padded[:, : weight.rows] = scales.T
        return PackedOperand({"planes": planes, "scales": padded}, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        steps, columns = -(-k // GROUP), self._columns(m)
        buffers = {
            "planes": torch.empty(steps, columns, 4, dtype=torch.int32, device=device),
            "scales": torch.empty(steps, m, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        scales = checked_scales(x, self.spec.activation)
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        self._launch_packing(
            "pack_activations", (x.values.contiguous(), scales.contiguous()), packed
        )
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        self._launch_packing("quantize_pack", (x.contiguous(),), packed, overlap=True)

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
        chosen = config if isinstance(config, BtcConfig) else self.default_config(shape)
        tokens, a_bits = min(shape.m, MAX_TOKENS), self.spec.activation.bits
        function = load_function(chosen.build(a_bits, tokens), "flexq_btc")
        blocks = -(-shape.n // (MMA_ROWS * chosen.row_tiles))
        function.launch(
            (blocks, -(-shape.m // tokens), 1),
            chosen.warps * 32,
            (
                w.buffers["planes"],
                w.buffers["scales"],
                x.buffers["planes"],
                x.buffers["scales"],
                bias,
                out,
                shape.m,
                shape.n,
                shape.k,
            ),
            shared_bytes=chosen.shared_bytes(a_bits, tokens),
            overlap_previous=True,
        )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        allowed = shared_memory_limit(torch.cuda.current_device())
        tokens, a_bits = min(gemm.m, MAX_TOKENS), self.spec.activation.bits
        return [c for c in _configs(tokens) if c.shared_bytes(a_bits, tokens) <= allowed]

    def default_config(self, gemm: GemmWorkload) -> BtcConfig:
        return BtcConfig(row_tiles=1, warps=8, stages=4)

    def builds(self) -> Sequence[Build]:
        a_bits = self.spec.activation.bits
        packing = [Build.of("flexq_pack.cu", BITS=bits) for bits in sorted({W_BITS, a_bits})]
        main = [c.build(a_bits, tokens) for tokens in (1, 4, 8) for c in _configs(tokens)]
        return [*packing, *main]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config if isinstance(config, BtcConfig) else self.default_config(gemm)
        a_bits = self.spec.activation.bits
        main = chosen.build(a_bits, min(gemm.m, MAX_TOKENS))
        return [Build.of("flexq_pack.cu", BITS=a_bits), main]

    def _columns(self, m: int) -> int:
        return -(-m * self.spec.activation.bits // MMA_COLS) * MMA_COLS

    def _launch_packing(
        self,
        name: str,
        inputs: tuple[torch.Tensor, ...],
        packed: PackedOperand,
        *,
        overlap: bool = False,
    ) -> None:
        a_bits, columns = self.spec.activation.bits, self._columns(packed.rows)
        function = load_function(Build.of("flexq_pack.cu", BITS=a_bits), name)
        grid = (-(-packed.k // GROUP), -(-columns // a_bits), 1)
        arguments = (*inputs, packed.buffers["planes"], packed.buffers["scales"])
        function.launch(
            grid, 32, (*arguments, packed.rows, packed.k, columns), overlap_previous=overlap
        )


def _configs(tokens: int) -> list[BtcConfig]:
    """Those that don't spill: the sums of many tokens need more than a 16th of the registers."""
    return [c for c in _CONFIGS if tokens <= 4 or c.row_tiles * c.warps <= 16]

"""FlexQ W6A6 and W6A8 on binary tensor cores (arXiv 2508.04405, sections 4.1 to 4.3).

Bit planes of weights and activations are packed on the GPU; csrc/btc/gemm.cu describes their layout
and the multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    Probe,
    ProbeResult,
    checked_scales,
)
from flexq_bench.kernels.formats import NumberFormat, Operand, quantize
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.workloads.gemm import GemmWorkload

GROUP = 128
W_BITS = 6
MMA_ROWS, MMA_COLS = 16, 8
MAX_TOKENS = 8  # of one block; the blocks of further tokens read the weights from L2


@dataclass(frozen=True, slots=True)
class Optimizations:
    """Enabled optimizations (FlexQ, Table 6), described in csrc/btc/gemm.cu."""

    warp_reduction: bool = True
    pipeline: bool = True
    evict_first: bool = True
    dequant: bool = True

    @property
    def defines(self) -> dict[str, int]:
        """Defines of the disabled ones; `pipeline` has none, as it is the number of stages."""
        switches = asdict(self)
        del switches["pipeline"]
        return {name.upper(): 0 for name, enabled in switches.items() if not enabled}


VARIANTS = {
    "": Optimizations(),
    "vanilla": Optimizations(warp_reduction=False, pipeline=False, evict_first=False),
    "+warp-reduction": Optimizations(pipeline=False, evict_first=False),
    "+pipeline": Optimizations(evict_first=False),
    "+evict-first": Optimizations(),
    "-dequant": Optimizations(dequant=False),  # integer sums: see BinaryTensorCoreSums
}


@dataclass(frozen=True, slots=True)
class BtcConfig(Config):
    """row_tiles: of 16 rows per block; warps: of a block, which split K; stages: of cp.async."""

    row_tiles: int
    warps: int
    stages: int

    def build(self, a_bits: int, tokens: int, optimizations: Optimizations) -> Build:
        """Return the build of csrc/btc/gemm.cu for this configuration. tokens: 1 to 8 per block."""
        block = Block(
            "flexq_btc", self.warps * 32, self.shared_bytes(a_bits, tokens, optimizations)
        )
        defines = self.defines() | optimizations.defines
        return Build.of("btc/gemm.cu", block=block, A_BITS=a_bits, TOKENS=tokens, **defines)

    def shared_bytes(self, a_bits: int, tokens: int, optimizations: Optimizations) -> int:
        """Return the dynamic shared memory of a block in bytes, as csrc/btc/gemm.cu uses it."""
        stage = self.row_tiles * (W_BITS * MMA_ROWS * 16 + MMA_ROWS * 2)
        row_ints = -(-tokens * a_bits // MMA_COLS) * 4 + 1
        reduction = self.warps * self.row_tiles * MMA_ROWS * row_ints * 4
        scratch = 0 if optimizations.warp_reduction else W_BITS * MMA_ROWS * MMA_COLS * 4
        return max(self.warps * self.stages * stage, reduction) + self.warps * scratch


# Configurations of (1, 2) x (4, 8, 16) x (3, 4, 6) that were among the three fastest of a shape.
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


_UNPIPELINED = tuple(BtcConfig(row_tiles, warps, 1) for row_tiles in (1, 2) for warps in (4, 8))


class BinaryTensorCoreGemm(CheckedGemm):
    """`flexq-w6a<a_bits>` and its variants."""

    def __init__(self, a_bits: int, variant: str = "") -> None:
        self._optimizations = VARIANTS[variant]
        self.spec = KernelSpec(
            name=f"flexq-w6a{a_bits}",
            variant=variant,
            backend="cuda",
            weight=NumberFormat(W_BITS, GROUP),
            activation=NumberFormat(a_bits, GROUP),
            summary=f"FlexQ W6A{a_bits} on binary tensor cores",
            # Blackwell emulates binary MMA with int8.
            max_capability=(9, 0),
            overlaps_launches=True,
        )

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        steps, tiles = -(-weight.k // GROUP), -(-weight.rows // MMA_ROWS)
        device = weight.values.device
        planes = torch.empty(steps, tiles, W_BITS, MMA_ROWS, 4, dtype=torch.int32, device=device)
        codes = weight.values.contiguous()
        function = load_function(Build.of("btc/pack.cu", BITS=W_BITS), "pack_weights")
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

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        chosen = config if isinstance(config, BtcConfig) else self.default_config(shape)
        tokens, a_bits = min(shape.m, MAX_TOKENS), self.spec.activation.bits
        build = chosen.build(a_bits, tokens, self._optimizations)
        blocks = -(-shape.n // (MMA_ROWS * chosen.row_tiles))
        sizes = (shape.m, shape.n, shape.k)
        operands = [o.buffers[part] for o in (w, x) for part in ("planes", "scales")]
        load_function(build, "flexq_btc").launch(
            (blocks, -(-shape.m // tokens), 1),
            chosen.warps * 32,
            (*operands, bias, out, *sizes),
            shared_bytes=chosen.shared_bytes(a_bits, tokens, self._optimizations),
            overlap_previous=True,
        )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        allowed = current_gpu().block_shared_bytes
        tokens, a_bits = min(gemm.m, MAX_TOKENS), self.spec.activation.bits
        configs = self._configs(tokens)
        return [
            c for c in configs if c.shared_bytes(a_bits, tokens, self._optimizations) <= allowed
        ]

    def default_config(self, gemm: GemmWorkload) -> BtcConfig:
        return BtcConfig(row_tiles=1, warps=8, stages=4 if self._optimizations.pipeline else 1)

    def builds(self) -> Sequence[Build]:
        a_bits = self.spec.activation.bits
        packing = [Build.of("btc/pack.cu", BITS=bits) for bits in sorted({W_BITS, a_bits})]
        # Variants: only the largest number of tokens, which needs the most registers.
        sizes = (MAX_TOKENS,) if self.spec.variant else (1, 4, MAX_TOKENS)
        main = [
            c.build(a_bits, tokens, self._optimizations)
            for tokens in sizes
            for c in self._configs(tokens)
        ]
        return [*packing, *main]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config if isinstance(config, BtcConfig) else self.default_config(gemm)
        a_bits = self.spec.activation.bits
        main = chosen.build(a_bits, min(gemm.m, MAX_TOKENS), self._optimizations)
        return [Build.of("btc/pack.cu", BITS=a_bits), main]

    def _configs(self, tokens: int) -> list[BtcConfig]:
        """Return the configurations without spills: with 16 warps the sums of many tokens spill."""
        configs = _CONFIGS if self._optimizations.pipeline else _UNPIPELINED
        return [c for c in configs if tokens <= 4 or c.row_tiles * c.warps <= 16]

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
        function = load_function(Build.of("btc/pack.cu", BITS=a_bits), name)
        # One warp per block: blocks of several warps made M = 8 slower at large K on an H200.
        grid = (-(-packed.k // GROUP), -(-columns // a_bits), 1)
        arguments = (*inputs, packed.buffers["planes"], packed.buffers["scales"])
        sizes = (packed.rows, packed.k, columns)
        function.launch(grid, 32, (*arguments, *sizes), overlap_previous=overlap)


class _SharedTokens(PackedOperand):
    """Operand whose clones share all buffers except those that a launch reads as weights."""

    __slots__ = ()

    def clone(self) -> PackedOperand:
        return self.with_buffers(planes=self.buffers["planes"].clone())


class BinaryTensorCoreSums(Probe):
    """`flexq-w6a<a_bits>[-dequant]`: the kernel without scales (FlexQ, Table 6, last row).

    It stores int32 sums over all of K, which are no output of a layer.
    """

    def __init__(self, a_bits: int) -> None:
        self._gemm = BinaryTensorCoreGemm(a_bits, "-dequant")
        self.spec = replace(
            self._gemm.spec, stages=("gemm",), summary="FlexQ's kernel without dequantization"
        )

    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        generator = torch.Generator(device=device).manual_seed(seed)
        tokens, weights = (
            quantize(torch.randn(rows, gemm.k, generator=generator, device=device), number)
            for rows, number in ((gemm.m, self.spec.activation), (gemm.n, self.spec.weight))
        )
        x, w = self._gemm.pack_activation(tokens), self._gemm.pack_weight(weights)
        buffers = {
            **w.buffers,
            "x_planes": x.buffers["planes"],
            "x_scales": x.buffers["scales"],
            "x_codes": tokens.values,
            "w_codes": weights.values,
            "sums": torch.empty(gemm.m, gemm.n, dtype=torch.int32, device=device),
        }
        return _SharedTokens(buffers, gemm.n, gemm.k)

    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        b = operand.buffers
        x_buffers = {"planes": b["x_planes"], "scales": b["x_scales"]}
        m, n = b["sums"].shape
        x = PackedOperand(x_buffers, m, operand.k)
        call = GemmCall(x, operand, b["sums"], None, GemmWorkload(m, n, operand.k))
        self._gemm.compute(call, config)

    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        b = operand.buffers
        sums = b["sums"].fill_(-(2**31))  # differs from every sum
        self.launch(operand, config)
        wrong = int((sums != b["x_codes"].double() @ b["w_codes"].double().T).sum())
        return ProbeResult(wrong == 0, f"{wrong:,} of {sums.numel():,} sums are wrong")

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return self._gemm.candidates(gemm)

    def builds(self) -> Sequence[Build]:
        return self._gemm.builds()

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        return self._gemm.builds_for(gemm, config)

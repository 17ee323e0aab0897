"""ABQ-LLM (arXiv 2408.08554): weights and activations of 2 to 8 bits on binary tensor cores.

W is decomposed into W_BITS bit planes `[bit][row][K/32]`, X into A_BITS `[token][bit][K/32]`. One
scale per output channel and one per token are applied once, to integer sums over all of K.
csrc/abq/gemm.cu describes the multiplication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    checked_scales,
)
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build
from flexq_bench.workloads.gemm import GemmWorkload

CHUNK_K = 128  # values of k in 16 bytes of a plane
MMA_ROWS, MMA_COLS = 16, 8
MAX_TOKENS = 8  # of one block; the blocks of further tokens read the weights from L2
_PACKING_WARPS = 8  # of a block of csrc/abq/pack.cu
_MAX_SLICES = 16  # blocks per token in quantize_pack: each reads the row to find its maximum


@dataclass(frozen=True, slots=True)
class AbqConfig(Config):
    """Configuration of csrc/abq/gemm.cu.

    row_tiles: of 16 rows per block; warps: of a block, which split K; stages: of cp.async, 1: no
    pipeline; step_k: values of k per stage, 256 or 512.
    """

    row_tiles: int
    warps: int
    stages: int
    step_k: int


# Search space. Other steps of 256 k, and blocks of 16 warps, were never the fastest of a case.
_SEARCH = tuple(
    AbqConfig(*choice)
    for choice in (
        (1, 8, 3, 256),
        (1, 4, 3, 512),
        (1, 8, 2, 512),
        (1, 8, 3, 512),
        (2, 4, 2, 512),
    )
)


@dataclass(frozen=True, slots=True)
class Switches:
    """Optimizations enabled in one ablation of ABQ-LLM's Table 4.

    fill_columns: bit planes of the tokens fill an MMA's 8 columns (the paper's GEMV elimination);
    False: the columns are 8 tokens of one plane, so M is padded to 8.
    configs: the search space; a single one: no search.
    """

    fill_columns: bool
    configs: tuple[AbqConfig, ...]


# Each variant adds one optimization. `+auto-search` equals the kernel without a variant.
SWITCHES = {
    "native": Switches(fill_columns=False, configs=(AbqConfig(1, 4, 1, 256),)),
    "+pipeline": Switches(fill_columns=False, configs=(AbqConfig(1, 4, 4, 256),)),
    "+gemv-elimination": Switches(fill_columns=True, configs=(AbqConfig(1, 4, 4, 256),)),
    "+auto-search": Switches(fill_columns=True, configs=_SEARCH),
    "": Switches(fill_columns=True, configs=_SEARCH),
}

# Widths whose builds represent those of all 49: both ends, the middle, an odd pair.
_CHECKED_WIDTHS = ((2, 2), (2, 8), (3, 5), (4, 4), (6, 6), (6, 8), (8, 8))


class ArbitraryBitGemm(CheckedGemm):
    """`abq-w<w_bits>a<a_bits>`, 2 to 8 bits each. Raises ShapeError if sums could overflow int32.

    balanced: `abq-w2*a<a_bits>`, the paper's bit-balanced 2-bit weights -2 … 2, in three planes.
    """

    def __init__(
        self, w_bits: int, a_bits: int, variant: str = "", *, balanced: bool = False
    ) -> None:
        width = "2*" if balanced else w_bits
        self.spec = KernelSpec(
            name=f"abq-w{width}a{a_bits}",
            backend="cuda",
            weight=NumberFormat(w_bits, kind="balanced" if balanced else "symmetric"),
            activation=NumberFormat(a_bits),
            summary=f"ABQ-LLM W{width}A{a_bits} on binary tensor cores",
            variant=variant,
            # Blackwell emulates binary MMA with int8.
            max_capability=(9, 0),
            overlaps_launches=True,
        )
        self._switches = SWITCHES[variant]

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        self._check_k(weight.k)
        planes = _empty_planes(weight.bits, weight.rows, weight.k, weight.values.device)
        _pack_codes(weight, planes, row_step=1, plane_step=weight.rows)
        buffers = {"planes": planes, "scales": scales.flatten().contiguous()}
        return PackedOperand(buffers, weight.rows, weight.k)

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        self._check_k(k)
        buffers = {
            "planes": _empty_planes(m, self.spec.activation.bits, k, device),
            "scales": torch.empty(m, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        scales = checked_scales(x, self.spec.activation)
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        _pack_codes(x, packed.buffers["planes"], row_step=x.bits, plane_step=1)
        packed.buffers["scales"].copy_(scales.flatten())
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        blocks = -(-packed.k // (CHUNK_K * _PACKING_WARPS))
        load_function(_packing(self.spec.activation.bits), "quantize_pack").launch(
            (packed.rows, min(blocks, _MAX_SLICES), 1),
            32 * _PACKING_WARPS,
            (x.contiguous(), packed.buffers["planes"], packed.buffers["scales"], packed.k),
            overlap_previous=True,
        )

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        chosen = config if isinstance(config, AbqConfig) else self.default_config(shape)
        tokens = self._tokens(shape.m)
        blocks = -(-shape.n // (MMA_ROWS * chosen.row_tiles))
        load_function(self._build(chosen, tokens), "abq").launch(
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
            shared_bytes=self._shared_bytes(chosen, tokens),
            overlap_previous=True,
        )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        allowed = current_gpu().block_shared_bytes
        tokens = self._tokens(gemm.m)
        return [
            config
            for config in self._switches.configs
            if self._shared_bytes(config, tokens) <= allowed
        ]

    def default_config(self, gemm: GemmWorkload) -> AbqConfig:
        """Return the configuration that was the fastest of most such cases on an H200.

        Of 123 cases at twelve pairs of widths all had steps of 512 k. Every choice fits the shared
        memory of a block on every GPU.
        """
        configs, w_bits = self._switches.configs, self.spec.weight.bits
        if len(configs) == 1:
            return configs[0]
        tiles = -(-self._tokens(gemm.m) * self.spec.activation.bits // MMA_COLS)
        if w_bits >= 7 or tiles >= 6 or (w_bits >= 5 and tiles >= 3):
            return AbqConfig(1, 4, 3, 512)
        return AbqConfig(1, 8, 3 if w_bits <= 3 else 2, 512)

    def builds(self) -> Sequence[Build]:
        """Return the builds of a representative set of widths; for other widths none."""
        w_bits, a_bits = self.spec.weight.bits, self.spec.activation.bits
        if (w_bits, a_bits) not in _CHECKED_WIDTHS:
            return ()
        configs = self._switches.configs
        main = [self._build(config, MAX_TOKENS) for config in configs]
        packing = [_packing(bits) for bits in sorted({w_bits, a_bits})]
        return [*packing, self._build(configs[0], self._tokens(1)), *main]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config if isinstance(config, AbqConfig) else self.default_config(gemm)
        main = self._build(chosen, self._tokens(gemm.m))
        return [_packing(self.spec.activation.bits), main]

    def _tokens(self, m: int) -> int:
        """Return the tokens that a block computes."""
        return min(m, MAX_TOKENS) if self._switches.fill_columns else MMA_COLS

    def _build(self, config: AbqConfig, tokens: int) -> Build:
        return Build.of(
            "abq/gemm.cu",
            block=Block("abq", config.warps * 32, self._shared_bytes(config, tokens)),
            W_BITS=self.spec.weight.bits,
            A_BITS=self.spec.activation.bits,
            TOKENS=tokens,
            FILL=int(self._switches.fill_columns),
            **config.defines(),
        )

    def _shared_bytes(self, config: AbqConfig, tokens: int) -> int:
        """Return the dynamic shared memory of a block in bytes, as csrc/abq/gemm.cu uses it."""
        rows = config.row_tiles * MMA_ROWS
        ring = config.warps * config.stages * rows * self.spec.weight.bits * config.step_k // 8
        column_tiles = -(-tokens * self.spec.activation.bits // MMA_COLS)
        reduction = config.warps * rows * (column_tiles * MMA_COLS + 1) * 4
        return max(ring, reduction)

    def _check_k(self, k: int) -> None:
        """Check that K products of the lowest codes, 2^(w_bits + a_bits - 2) each, fit int32."""
        bits = self.spec.weight.bits + self.spec.activation.bits - 2
        longest = (2**31 - 1) >> bits
        if k > longest:
            raise ShapeError(
                f"{self.spec.label} sums in int32, so K may be at most {longest:,}, got {k:,}: "
                "use fewer bits, or split the layer along K"
            )


def _empty_planes(outer: int, inner: int, k: int, device: torch.device) -> torch.Tensor:
    return torch.empty(outer, inner, -(-k // CHUNK_K), 4, dtype=torch.int32, device=device)


def _packing(bits: int) -> Build:
    return Build.of("abq/pack.cu", BITS=bits)


def _pack_codes(operand: Operand, planes: torch.Tensor, *, row_step: int, plane_step: int) -> None:
    """Pack codes; plane `bit` of row r becomes row r·row_step + bit·plane_step of `planes`."""
    blocks = -(-operand.k // (CHUNK_K * _PACKING_WARPS))
    load_function(_packing(operand.bits), "pack_codes").launch(
        (operand.rows, blocks, 1),
        32 * _PACKING_WARPS,
        (operand.values.contiguous(), planes, operand.k, row_step, plane_step),
    )

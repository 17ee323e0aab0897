"""FlexQ's formats on int8 tensor cores: 6-bit weights, dequantized in registers (csrc/imma).

This is not in the paper: the operands and exact integer sums are those of `flexq-w6a6` and
`flexq-w6a8`, on the tensor core that every GPU from Ampere to Blackwell has.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import (
    CheckedGemm,
    Config,
    GemmCall,
    KernelSpec,
    PackedOperand,
    Packing,
    checked_scales,
)
from flexq_bench.kernels.cuda.imma.configuration_choice import (
    FLEXQ,
    Candidates,
    bucket_of,
)
from flexq_bench.kernels.cuda.imma.configurations import (
    CHUNK,
    GROUP,
    MMA_ROWS,
    MMA_TOKENS,
    SIX_BITS,
    WGMMA_ARCH,
    AnyImmaConfig,
    ClusterConfig,
    PersistentConfig,
    Shares,
    TileFormat,
    chunks_of,
)
from flexq_bench.kernels.formats import NumberFormat, Operand
from flexq_bench.kernels.runtime.gpu import current_device, current_gpu
from flexq_bench.kernels.runtime.launch_flags import launch_flags
from flexq_bench.kernels.runtime.module import Argument, load_function
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.kernels.runtime.tensor_map import NO_MAP, plain_rows, swizzled_rows
from flexq_bench.workloads.gemm import GemmWorkload

W_BITS = 6
_QUANTIZE_WARPS = 8  # of a block of quantize_rows in csrc/imma/pack.cu


class ImmaGemm(CheckedGemm):
    """Base class of kernels on csrc/imma/group_gemm*.cu: buffers of activations, and the launch.

    tiles: format of the weights. choice: candidates, and data for a choice without tuning. Packed
    weights have buffers `tiles` and `scales`, and `features` if output features have scales. Packed
    activations have `codes` and `scales`, and `order` if channels are reordered.
    """

    tiles: TileFormat
    choice: Candidates = FLEXQ

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        groups = -(-k // GROUP)
        m_padded = -(-m // MMA_TOKENS) * MMA_TOKENS
        token_scales = (groups, m_padded) if self.tiles.a_grouped else (m_padded,)
        buffers = {
            "codes": torch.zeros(m, groups * GROUP, dtype=torch.int8, device=device),
            "scales": torch.zeros(token_scales, dtype=torch.float32, device=device),
        }
        return PackedOperand(buffers, m, k)

    def pack_activation(self, x: Operand) -> PackedOperand:
        scales = checked_scales(x, self.spec.activation)
        packed = self.empty_activation(x.rows, x.k, x.values.device)
        codes = packed.buffers["codes"]
        codes[:, : x.k] = x.values.view(torch.int8)
        if self.in_mma_order(x.rows, x.k):
            codes.copy_(mma_order(codes))
        token_scales = scales.T if self.tiles.a_grouped else scales[:, 0]
        packed.buffers["scales"][..., : x.rows] = token_scales
        return packed

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        codes, scales = packed.buffers["codes"], packed.buffers["scales"]
        arguments = (x.contiguous(), codes, scales)
        load_function(self.packing_builds()[0], "quantize_rows").launch(
            (-(-scales.shape[0] // _QUANTIZE_WARPS), scales.shape[1], 1),
            32 * _QUANTIZE_WARPS,
            (
                *arguments,
                packed.rows,
                packed.k,
                int(self.in_mma_order(packed.rows, packed.k)),
                packed.buffers.get("order"),
            ),
            overlap_previous=True,
        )

    def compute(self, call: GemmCall, config: Config | None) -> None:
        x, w, out, bias, shape = call
        c = config if isinstance(config, AnyImmaConfig) else self.default_config(shape)
        rest: tuple[Argument, ...] = (
            x.buffers["scales"],
            bias,
            out,
            shape.m,
            shape.n,
            shape.k,
            w.buffers.get("features"),
        )
        steps, sms = self.tiles.steps(shape.k), current_gpu().sms
        if isinstance(c, PersistentConfig):
            shares = c.shares(shape.m, shape.n, steps, sms)
            arguments: tuple[Argument, ...] = (
                *self._tensor_maps(x, w, c.rows, c.tokens, c.tokens // c.sharers),
                *rest,
                *_partial_sums(c, shares, out.device),
                shares.shared,
                shares.each,
                shares.longer,
                shares.inverse,
            )
            grid, cluster = (shares.blocks, 1, 1), c.cluster
        elif isinstance(c, ClusterConfig):
            shares = c.shares(shape.m, shape.n, steps, sms)
            arguments = (
                *self._tensor_maps(x, w, c.rows, c.tokens, c.tokens),
                *rest,
                *_partial_sums(c, shares, out.device),
                shares.each,
                shares.longer,
                shares.inverse,
            )
            grid, cluster = (c.launched_blocks(shares, sms), 1, 1), c.k_split
        else:
            arguments = (w.buffers["tiles"], w.buffers["scales"], x.buffers["codes"], *rest)
            grid, cluster = c.grid(shape.m, shape.n), c.k_split
        load_function(c.build(self.tiles), c.function).launch(
            grid,
            c.threads,
            arguments,
            shared_bytes=c.shared_bytes(self.tiles),
            overlap_previous=True,
            cluster=cluster,
        )

    def _tensor_maps(
        self, x: PackedOperand, w: PackedOperand, rows: int, tokens: int, box_tokens: int
    ) -> tuple[Argument, ...]:
        """Return the maps of tiles, their scales, codes and their scales.

        rows, tokens: of a block tile. box_tokens: of one load.
        """
        tile_rows = rows // MMA_ROWS
        return (
            plain_rows(w.buffers["tiles"], tile_rows, self.tiles.tile_bytes),
            plain_rows(w.buffers["scales"], tile_rows, self.tiles.scale_bytes),
            swizzled_rows(x.buffers["codes"], box_tokens, GROUP),
            plain_rows(x.buffers["scales"], 1, tokens * 4) if self.tiles.a_grouped else NO_MAP,
        )

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        return self.fitting(gemm)

    def fitting(self, gemm: GemmWorkload) -> Sequence[AnyImmaConfig]:
        """Return the configurations of csrc/imma that the GPU can run."""
        gpu = current_gpu()
        return [
            c
            for c in self.configs(gemm)
            if c.shared_bytes(self.tiles) <= gpu.block_shared_bytes
            and c.build(self.tiles).runs_on(gpu.arch)
        ]

    def tuning_bucket(self, m: int) -> int:
        return bucket_of(m)

    def default_config(self, gemm: GemmWorkload) -> AnyImmaConfig:
        return self.choice.choose(self.fitting(gemm), gemm, current_device())

    def builds(self) -> Sequence[Build]:
        return [
            *self.packing_builds(),
            *(config.build(self.tiles) for config in self.every_config()),
        ]

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        chosen = config if isinstance(config, AnyImmaConfig) else self.default_config(gemm)
        return [*self.packing_builds(), chosen.build(self.tiles)]

    def in_mma_order(self, m: int, k: int) -> bool:
        """Return True if m tokens of K = k run in warpgroup MMA kernels, which read MMA order."""
        return current_gpu().arch == WGMMA_ARCH and self.choice.in_mma_order(m, k)

    def configs(self, gemm: GemmWorkload) -> Sequence[AnyImmaConfig]:
        """Return the configurations for a GEMM that fit the order of the current GPU."""
        in_order = self.in_mma_order(gemm.m, gemm.k)
        return self.choice.for_gemm(gemm, current_gpu().sms, in_mma_order=in_order)

    def every_config(self) -> Sequence[AnyImmaConfig]:
        """Return the configurations for all numbers of tokens."""
        return self.choice.every()

    @abstractmethod
    def packing_builds(self) -> Sequence[Build]:
        """Return the builds that pack operands; the first one has quantize_rows."""


class Int8TensorCoreGemm(ImmaGemm):
    """`flexq-imma-w6a<a_bits>`."""

    tiles = SIX_BITS

    def __init__(self, a_bits: int) -> None:
        self.spec = KernelSpec(
            name=f"flexq-imma-w6a{a_bits}",
            backend="cuda",
            weight=NumberFormat(W_BITS, GROUP),
            activation=NumberFormat(a_bits, GROUP),
            summary=f"FlexQ W6A{a_bits} on int8 tensor cores, weights widened in registers",
            overlaps_launches=True,
        )
        self._packing = Build.of("imma/pack.cu", A_BITS=a_bits)

    def pack_weight(self, weight: Operand) -> PackedOperand:
        scales = checked_scales(weight, self.spec.weight)
        steps, row_tiles = -(-weight.k // GROUP), -(-weight.rows // MMA_ROWS)
        device = weight.values.device
        tiles = torch.empty(
            row_tiles, steps, self.tiles.tile_bytes, dtype=torch.uint8, device=device
        )
        tile_scales = torch.empty(row_tiles, steps, 8, 2, dtype=torch.float16, device=device)
        arguments = (weight.values.contiguous(), scales.contiguous(), tiles, tile_scales)
        load_function(self._packing, "pack_weights").launch(
            (steps, row_tiles, 1),
            32,
            (*arguments, weight.rows, weight.k),
        )
        return PackedOperand({"tiles": tiles, "scales": tile_scales}, weight.rows, weight.k)

    def packing(self, x: PackedOperand, config: Config | None) -> Packing:
        codes, scales = x.buffers["codes"], x.buffers["scales"]
        bits = self.spec.activation.bits
        return Packing("group-codes", bits, codes, scales, self.in_mma_order(x.rows, x.k))

    def packing_builds(self) -> Sequence[Build]:
        return [self._packing]


def _partial_sums(
    config: PersistentConfig | ClusterConfig, shares: Shares, device: torch.device
) -> tuple[Argument, ...]:
    """Allocate partial sums and flags of a launch; return them with the number of the launch.

    The memory belongs to this launch: later work on the stream may reuse it.
    """
    if not shares.shared:
        return None, None, 0
    warps = config.rows // MMA_ROWS
    words = warps * chunks_of(config.tokens, config.contributors) * CHUNK * MMA_ROWS
    if config.contributors > 1:  # partial sums have marks instead of flags
        marked, number = launch_flags(current_gpu().sms * words * 2)
        return marked, None, number
    sums = torch.empty(shares.blocks, words, dtype=torch.float32, device=device)
    return sums, *launch_flags(current_gpu().sms * warps)


def mma_order(codes: torch.Tensor) -> torch.Tensor:
    """Reorder the k of each group of codes [M, steps * 128] as in csrc/imma/mma_order.cuh."""
    lanes, mmas, halves = 4, 4, 2  # a word of each has 4 adjacent k
    words = codes.view(codes.shape[0], -1, lanes, mmas, halves, 4)
    return words.permute(0, 1, 3, 4, 2, 5).reshape(codes.shape)

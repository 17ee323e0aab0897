"""A layer of experts, from the tokens to the weighted sum of their experts' results.

Tokens are quantized and sorted by expert; gate and up projection of each expert; SiLU(gate) · up,
quantized; down projection; weighted sum. The first kernel chooses the experts by their logits; of
many tokens, another does; of few tokens, norm and router are part of it. All sizes but the number
of tokens are on the device, so that a captured graph serves any routing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from flexq_bench.kernels.cuda.cublas.dense import Fp16Gemm, Int8Gemm
from flexq_bench.kernels.cuda.grouped.gemm import (
    GroupedConfig,
    candidates,
    configs_for,
    grouped_gemm,
    layer_configs,
)
from flexq_bench.kernels.cuda.grouped.packing import BF16, EIGHT, FOUR, FP16, SIX, ExpertFormat
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.operations import Destination, Norm, WeightedRows
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.runtime.launch_flags import launch_flags
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build

# Names of kernels, as profiles show them: the first of all linear layers of experts.
GROUPED, NORMED_ROUTE = "grouped_", "normed_route"
_BUILD = Build.of("grouped/layer.cu")
_THREADS, _WARPS, _FEATURES = 256, 8, 8  # of a block; of a thread of combine
_MOST_EXPERTS, _MOST_TOP_K, _MOST_K = 512, 16, 8192
_FEW_TOKENS = 32  # whose experts route_tokens chooses
# Of normed_route.cu: blocks, experts of each, the most tokens and K, of which K is a multiple.
_BLOCKS, _BLOCK_EXPERTS, _ROUTED_TOKENS, _ROUTED_K, _STEP_K = 8, 16, 8, 4096, 256
_TYPICAL = (128, 512)  # experts, which decide the number of stages; tokens, for every candidate


def builds() -> set[Build]:
    """Return the builds of grouped kernels of every format, and of the layer around them."""
    formats = (SIX, FOUR, EIGHT, FP16, BF16)
    return {_BUILD, *(_route_build(tokens, k) for tokens in (1, 8) for k in (2048, 4096))} | {
        config.build(fmt) for fmt in formats for config in candidates(fmt, *_TYPICAL)
    }


def layer_builds(
    gate_up: ExpertWeights, down: ExpertWeights, tokens: int, top_k: int
) -> set[Build]:
    """Return the builds of a layer with its default configurations."""
    first, second = default_configs(gate_up, down, tokens, top_k)
    made = {_BUILD, first.build(gate_up.fmt), second.build(down.fmt)}
    if can_route_sums(tokens, len(gate_up.scales), gate_up.k):
        made.add(_route_build(tokens, gate_up.k))
    return made


def can_route_sums(tokens: int, experts: int, k: int) -> bool:
    """Return True if one kernel computes norm, logits and choice of experts (normed_route.cu)."""
    return (
        tokens <= _ROUTED_TOKENS
        and experts <= _BLOCKS * _BLOCK_EXPERTS
        and k <= _ROUTED_K
        and k % _STEP_K == 0
    )


def _route_build(tokens: int, k: int) -> Build:
    columns = 1 if tokens == 1 else _ROUTED_TOKENS
    # Of a token: values, padded; logits of the block and of all; sums of warps; choices.
    of_token = 2 * k + 64 + 2 * (_BLOCKS + 1) * _BLOCK_EXPERTS + _WARPS * 84 + 4 * _MOST_TOP_K
    shared = columns * of_token + _BLOCKS * _BLOCK_EXPERTS * 4 + 128
    block = Block(NORMED_ROUTE, _THREADS, shared)
    source = "grouped/normed_route.cu"
    return Build.of(source, only_sm=90, block=block, COLUMNS=columns, STEPS=k // _STEP_K)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Packed weights of one linear layer of all experts.

    chunks: of `pack_experts`. scales: FP16 [experts, N]; of FP16 weights all 1. k: input features.
    """

    fmt: ExpertFormat
    chunks: torch.Tensor
    scales: torch.Tensor
    k: int

    @property
    def nbytes(self) -> int:
        scales = 0 if self.fmt.element else self.scales.numel() * self.scales.element_size()
        return self.chunks.numel() * self.chunks.element_size() + scales


class ExpertLayer:
    """SwiGLU experts. gate_up: [experts, 2·I, K], gates before ups; down: [experts, K, I].

    tokens, top_k: of all calls. configs: of both linear layers; None: the default ones.
    Raises ShapeError if the experts, top_k or K are too many.
    """

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        tokens: int,
        top_k: int,
        configs: tuple[GroupedConfig, GroupedConfig] | None = None,
    ) -> None:
        experts, rows, device = len(gate_up.scales), tokens * top_k, gate_up.chunks.device
        if (
            experts > _MOST_EXPERTS
            or top_k > _MOST_TOP_K
            or gate_up.k > _MOST_K
            or gate_up.k % _FEATURES
        ):
            raise ShapeError(
                f"a layer of experts takes up to {_MOST_EXPERTS} experts, top_k up to "
                f"{_MOST_TOP_K} and K up to {_MOST_K}, a multiple of {_FEATURES}: got {experts}, "
                f"{top_k} and {gate_up.k}"
            )
        self._gate_up, self._down, self._top_k = gate_up, down, top_k
        self._configs = configs or default_configs(gate_up, down, tokens, top_k)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self._is_dense = gate_up.fmt.element != 0
        padded = 2 * gate_up.k if self._is_dense else -(-gate_up.k // 16) * 16
        self._codes = empty(rows, padded, dtype=torch.int8)
        self._scales = None if self._is_dense else empty(rows, dtype=torch.float32)
        self._chosen = empty(tokens, top_k, dtype=torch.int32)
        self._shares = empty(tokens, top_k, dtype=torch.float32)
        self._sizes = empty(experts, dtype=torch.int32)
        self._row_of = empty(rows, dtype=torch.int32)
        self._hidden = empty(rows, gate_up.scales.shape[1], dtype=torch.float16)
        self._results = empty(rows, gate_up.k, dtype=torch.float16)
        self._total = empty(tokens, gate_up.k, dtype=torch.float16)
        reader = Fp16Gemm() if self._is_dense else Int8Gemm()
        self._inner = Destination(reader, reader.empty_activation(rows, down.k, device), None)
        self._operations = CudaOperations()

    @property
    def sizes(self) -> torch.Tensor:
        """int32 [experts]: rows of each expert in the last call."""
        return self._sizes

    def with_weights(self, gate_up: ExpertWeights, down: ExpertWeights) -> ExpertLayer:
        """Return a layer of other weights of the same shapes, which shares the buffers."""
        other = copy.copy(self)
        other._gate_up, other._down = gate_up, down
        return other

    def mix(
        self, x: torch.Tensor, logits: torch.Tensor, out: torch.Tensor | None, *, normalizes: bool
    ) -> WeightedRows:
        """Apply the experts that logits FP16 [tokens, experts] choose to x FP16 [tokens, K].

        normalizes: shares of a token's experts sum up to 1. out: of the sum; None: it is not
        computed. Returns what is to be summed, valid until the next call.
        """
        if len(x) > _FEW_TOKENS:
            choose_experts(logits, self._chosen, self._shares, normalizes=normalizes)
            self._run(x, None, self._chosen, False, self._shares, out)
        else:
            self._run(x, logits, None, normalizes, self._shares, out)
        return WeightedRows(self._results, self._row_of, self._shares)

    def mix_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor,
        norm: Norm,
        router: torch.Tensor,
        *,
        normalizes: bool,
    ) -> tuple[torch.Tensor, WeightedRows]:
        """Apply the experts that router FP16 [experts, K] chooses to the norm of residual + delta.

        All FP16 [tokens, K], of which `can_route_sums`. Returns the sum and what is to be summed,
        valid until the next call.
        """
        tokens, k = residual.shape
        build, published = _route_build(tokens, k), launch_flags(1)
        assert build.block is not None
        load_function(build, NORMED_ROUTE).launch(
            (_BLOCKS, 1, 1),
            _THREADS,
            (
                residual,
                delta,
                self._total,
                norm.weight,
                router,
                self._shares,
                self._sizes,
                self._row_of,
                self._codes,
                self._scales,
                *published,
                float(norm.eps),
                tokens,
                len(self._sizes),
                self._top_k,
                int(normalizes),
                self._codes.shape[1],
            ),
            shared_bytes=build.block.shared_bytes,
            overlap_previous=True,
            cluster=_BLOCKS,
        )
        self._run_rows(published)
        return self._total, WeightedRows(self._results, self._row_of, self._shares)

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the layer's output for x FP16 [tokens, K] to out, of the same shape.

        chosen: int32 [tokens, top_k], the experts of each token. shares: FP32, their weights.
        """
        self._run(x, None, chosen, False, shares, out)

    def _run(
        self,
        x: torch.Tensor,
        logits: torch.Tensor | None,
        chosen: torch.Tensor | None,
        normalizes: bool,
        shares: torch.Tensor,
        out: torch.Tensor | None,
    ) -> None:
        (tokens, k), published = x.shape, launch_flags(1)
        load_function(_BUILD, "route_tokens").launch(
            (tokens, 1, 1),
            _THREADS,
            (
                logits,
                chosen,
                shares,
                x,
                self._sizes,
                self._row_of,
                self._codes,
                self._scales,
                *published,
                len(self._sizes),
                self._top_k,
                int(normalizes),
                k,
                self._codes.shape[1],
            ),
            shared_bytes=len(self._sizes) * 4,
            overlap_previous=True,
        )
        self._run_rows(published)
        if out is None:
            return
        load_function(_BUILD, "combine").launch(
            (-(-k // (_THREADS * _FEATURES)), tokens, 1),
            _THREADS,
            (self._results, self._row_of, shares, out, k, self._top_k),
            overlap_previous=True,
        )

    def _run_rows(self, published: tuple[torch.Tensor, int]) -> None:
        """Compute the results of all rows from their codes. published: as grouped_gemm."""

        def multiply(
            number: int,
            w: ExpertWeights,
            codes: torch.Tensor,
            scales: torch.Tensor | None,
            y: torch.Tensor,
        ) -> None:
            config, of_rows = self._configs[number], None if self._is_dense else w.scales
            routed = (scales, w.chunks, of_rows, self._sizes, y)
            grouped_gemm(w.fmt, config, codes, *routed, published=published)

        multiply(0, self._gate_up, self._codes, self._scales, self._hidden)
        self._operations.silu_mul(self._hidden, self._inner)
        inner, rows = self._inner.packed.buffers, len(self._results)
        if self._is_dense:
            multiply(1, self._down, inner["values"][:rows].view(torch.int8), None, self._results)
        else:
            multiply(1, self._down, inner["codes"], inner["scales"], self._results)


def choose_experts(
    logits: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, *, normalizes: bool
) -> None:
    """Write the experts with the largest logits FP16 [tokens, experts], and their softmax.

    chosen: int32 [tokens, top_k]. shares: FP32, likewise. normalizes: over the chosen ones.
    """
    tokens, experts = logits.shape
    load_function(_BUILD, "choose_experts").launch(
        (-(-tokens // _WARPS), 1, 1),
        _THREADS,
        (logits, chosen, shares, tokens, experts, chosen.shape[1], int(normalizes)),
        overlap_previous=True,
    )


def default_configs(
    gate_up: ExpertWeights, down: ExpertWeights, tokens: int, top_k: int
) -> tuple[GroupedConfig, GroupedConfig]:
    """Return the default configurations of both linear layers."""
    of_few = layer_configs(gate_up.fmt, len(gate_up.scales), tokens * top_k, top_k)
    if of_few is not None:
        return of_few
    first, second = (
        configs_for(
            w.fmt,
            {
                "experts": len(w.scales),
                "tokens": tokens,
                "top_k": top_k,
                "n": w.scales.shape[1],
                "k": w.k * (2 if w.fmt.element else 1),
            },
        )[0]
        for w in (gate_up, down)
    )
    return first, second

"""A layer of experts, from the tokens to the weighted sum of their experts' results.

Five kernels: tokens are quantized and sorted by expert; gate and up projection of each expert;
SiLU(gate) · up, quantized; down projection; weighted sum. All sizes but the number of tokens are on
the device, so that a captured graph serves any routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.cuda.cublas.dense import Int8Gemm
from flexq_bench.kernels.cuda.grouped.gemm import (
    GroupedConfig,
    candidates,
    configs_for,
    grouped_gemm,
)
from flexq_bench.kernels.cuda.grouped.packing import BF16, EIGHT, FOUR, FP16, SIX, ExpertFormat
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.operations import Destination
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.runtime.module import load_function
from flexq_bench.kernels.runtime.nvrtc import Build

_BUILD = Build.of("grouped/layer.cu")
_THREADS, _FEATURES = 256, 8  # of a block; of a thread of combine
_MOST_TOP_K, _MOST_K = 16, 8192
_TYPICAL = (128, 512)  # experts, which decide the number of stages; tokens, for every candidate


def builds() -> set[Build]:
    """Return the builds of grouped kernels of every format, and of the layer around them."""
    formats = (SIX, FOUR, EIGHT, FP16, BF16)
    return {_BUILD} | {
        config.build(fmt) for fmt in formats for config in candidates(fmt, *_TYPICAL)
    }


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Packed weights of one linear layer of all experts.

    chunks: of `pack_experts`. scales: FP16 [experts, N]. k: input features.
    """

    fmt: ExpertFormat
    chunks: torch.Tensor
    scales: torch.Tensor
    k: int


class ExpertLayer:
    """SwiGLU experts. gate_up: [experts, 2·I, K], gates before ups; down: [experts, K, I].

    tokens, top_k: of all calls. configs: of both linear layers; None: the default ones.
    Raises ShapeError if top_k or K are too large.
    """

    def __init__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        tokens: int,
        top_k: int,
        configs: tuple[GroupedConfig, GroupedConfig] | None = None,
    ) -> None:
        if top_k > _MOST_TOP_K or gate_up.k > _MOST_K or gate_up.k % _FEATURES:
            raise ShapeError(
                f"a layer of experts takes top_k up to {_MOST_TOP_K} and K up to {_MOST_K}, a "
                f"multiple of {_FEATURES}: got {top_k} and {gate_up.k}"
            )
        self._gate_up, self._down, self._top_k = gate_up, down, top_k
        experts, rows, device = len(gate_up.scales), tokens * top_k, gate_up.chunks.device
        values = {"experts": experts, "tokens": tokens, "top_k": top_k}
        self._configs = configs or (
            configs_for(gate_up.fmt, values | {"n": gate_up.scales.shape[1], "k": gate_up.k})[0],
            configs_for(down.fmt, values | {"n": gate_up.k, "k": down.k})[0],
        )

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        padded = -(-gate_up.k // 16) * 16
        self._codes = empty(rows, padded, dtype=torch.int8)
        self._scales = empty(rows, dtype=torch.float32)
        self._sizes = empty(experts, dtype=torch.int32)
        self._row_of = empty(rows, dtype=torch.int32)
        self._hidden = empty(rows, gate_up.scales.shape[1], dtype=torch.float16)
        self._results = empty(rows, gate_up.k, dtype=torch.float16)
        reader = Int8Gemm()
        self._inner = Destination(reader, reader.empty_activation(rows, down.k, device), None)
        self._operations = CudaOperations()

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Write the layer's output for x FP16 [tokens, K] to out, of the same shape.

        chosen: int32 [tokens, top_k], the experts of each token. shares: FP32, their weights.
        """
        tokens, k = x.shape
        load_function(_BUILD, "route_tokens").launch(
            (tokens, 1, 1),
            _THREADS,
            (
                chosen,
                x,
                self._sizes,
                self._row_of,
                self._codes,
                self._scales,
                len(self._sizes),
                self._top_k,
                k,
                self._codes.shape[1],
            ),
            shared_bytes=len(self._sizes) * 4,
            overlap_previous=True,
        )
        self._multiply(0, self._gate_up, self._codes, self._scales, self._hidden)
        self._operations.silu_mul(self._hidden, self._inner)
        inner: PackedOperand = self._inner.packed
        self._multiply(
            1, self._down, inner.buffers["codes"], inner.buffers["scales"], self._results
        )
        load_function(_BUILD, "combine").launch(
            (-(-k // (_THREADS * _FEATURES)), tokens, 1),
            _THREADS,
            (self._results, self._row_of, shares, out, k, self._top_k),
            overlap_previous=True,
        )

    def _multiply(
        self,
        number: int,
        w: ExpertWeights,
        codes: torch.Tensor,
        scales: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        config = self._configs[number]
        grouped_gemm(w.fmt, config, codes, scales, w.chunks, w.scales, self._sizes, y)

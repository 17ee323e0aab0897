"""Interface of the non-GEMM operators of a decoder block.

Each operation writes its result as the next linear layer's activations, quantized and packed for
its kernel. Launches go to torch's current stream and may be captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import Config, LinearKernel, PackedOperand
from flexq_bench.kernels.decoder.kv import KvLayer


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of a norm. weight: FP16 [K]. bias: FP16 [K] of a layer norm; None: RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms per head. queries, keys: FP16 [head_dim], weights shared by all heads."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of attention. kv_heads: each is shared by heads / kv_heads adjacent query heads.

    rotary: FP32 [context, head_dim / 2, 2], cosines and sines; None: no rotary embedding.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: torch.Tensor | None

    @property
    def width(self) -> int:
        """Features of one token's concatenated queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Destination:
    """Activations of the next linear layer: `packed`, for `kernel` and `config`."""

    kernel: LinearKernel
    packed: PackedOperand
    config: Config | None


@dataclass(frozen=True, slots=True)
class WeightedRows:
    """A sum of rows for each token: results of its experts, which nothing has added yet.

    rows: FP16 [M * top_k, K]. numbers: int32 [M * top_k], of the rows of each token. shares: FP32
    [M, top_k], their weights.
    """

    rows: torch.Tensor
    numbers: torch.Tensor
    shares: torch.Tensor


class DecoderOperations(ABC):
    """One implementation on one backend.

    adds_rows: norm takes WeightedRows, too. routes_norms: a norm's order of sums may depend on the
    batch, so that a kernel of few tokens may compute it with the router of experts.
    """

    adds_rows = routes_norms = False

    @abstractmethod
    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | WeightedRows | None,
        norm: Norm,
        to: Destination,
    ) -> torch.Tensor:
        """Write the norm of residual + delta, FP16 [M,K], to `to`; return the sum.

        delta None: returns residual. The sum is overwritten by the second norm after this one.
        """

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor, to: Destination) -> None:
        """Write silu(gate) · up of FP16 [M, 2K], gates before ups, to `to`."""

    @abstractmethod
    def relu(self, x: torch.Tensor, to: Destination) -> None:
        """Write max(x, 0) of FP16 [M,K] to `to`."""

    @abstractmethod
    def norm_heads(self, qkv: torch.Tensor, shape: AttentionShape, norms: HeadNorms) -> None:
        """Normalize every head of queries and keys of FP16 [M, shape.width] in place.

        As Qwen3 does before the rotary embedding (arXiv:2505.09388, section 2).
        """

    @abstractmethod
    def attend(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        positions: torch.Tensor,
        longest: int,
        to: Destination,
        norms: HeadNorms | None = None,
    ) -> None:
        """Compute attention of one new token per sequence; add its key and value to the cache.

        qkv: FP16 [B, shape.width], before the rotary embedding. positions: int32 [B], of the new
        tokens; sequence b has slot b of the cache. longest: upper bound of the sequence lengths.
        norms: of queries and keys, as norm_heads; qkv may then be changed.
        """

    @abstractmethod
    def attend_prompts(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        slots: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """Compute causal attention of a chunk of each prompt, after its cached tokens.

        qkv: FP16 [B, T, width], chunks padded at their ends to T tokens; padding is written to the
        cache too, and overwritten before it is read. slots: int64 [B], of the cache. positions:
        int64 [B, T]. longest: upper bound of the ends of the chunks.
        Returns FP16 [B · T, heads · head_dim].
        """

    @abstractmethod
    def pick(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
    ) -> None:
        """Append each sequence's most likely token (greedy sampling; the first of equals).

        logits: FP16 [B, vocabulary]. tokens: int32 [B], written. positions: int32 [B], incremented
        up to the end of the row of history. history: int64 [>= B, capacity]; the token is written
        at its position.
        """

"""Interface of the non-GEMM operators of a decoder block.

Each operation leaves its result as the next linear layer's activations: quantized and packed where
its kernel wants that. Launches go to torch's current stream and may be captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kernels.contract import Config, LinearKernel, PackedOperand
from kernels.decoder.kv import KvLayer


@dataclass(frozen=True, slots=True)
class Norm:
    """weight: FP16 [K]. bias: FP16 [K] of a layer norm; None: RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of single heads. queries, keys: FP16 [head_dim], weights of all heads alike."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """kv_heads: each is shared by heads / kv_heads neighbouring query heads.

    rotary: FP32 [context, head_dim / 2, 2], cosines and sines; None: positions are not rotated.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rotary: torch.Tensor | None

    @property
    def width(self) -> int:
        """Features of one token's queries, keys and values side by side."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class Destination:
    """The activations of the linear layer that comes next: `packed`, for `kernel` and `config`."""

    kernel: LinearKernel
    packed: PackedOperand
    config: Config | None


class DecoderOperations(ABC):
    """One implementation on one backend."""

    @abstractmethod
    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm, to: Destination
    ) -> torch.Tensor:
        """The norm of residual + delta, FP16 [M,K], goes to `to`; their sum is returned.

        delta None: residual is returned. The sum is valid until the next but one norm.
        """

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor, to: Destination) -> None:
        """silu(gate) · up of FP16 [M, 2K], gates before ups, goes to `to`."""

    @abstractmethod
    def relu(self, x: torch.Tensor, to: Destination) -> None:
        """max(x, 0) of FP16 [M,K] goes to `to`."""

    @abstractmethod
    def norm_heads(self, qkv: torch.Tensor, shape: AttentionShape, norms: HeadNorms) -> None:
        """Norms every head of queries and of keys of FP16 [M, shape.width], in place.

        As Qwen3 does before positions rotate them (arXiv:2505.09388, section 2).
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
    ) -> None:
        """Attention of one new token a sequence, whose keys and values are added to the cache.

        qkv: FP16 [B, shape.width], before rotation. positions: int32 [B], of the new tokens;
        sequence b has slot b of the cache. longest: tokens that a sequence may have by now.
        """

    @abstractmethod
    def pick(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
    ) -> None:
        """Each sequence goes on by its most likely token, the first of equals.

        logits: FP16 [B, vocabulary]. tokens: int32 [B], written. positions: int32 [B], one further
        afterwards; at the end of its row of history a sequence stays. history: int64
        [>= B, capacity], where the token is written at its position.
        """

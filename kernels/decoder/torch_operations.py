"""The operators in torch, on any device: the CPU implementation and the reference of the CUDA one.

Values are rounded to FP16 where `transformers` rounds them in an FP16 model.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexq_bench.kernels.decoder import kv
from flexq_bench.kernels.decoder.kv import KvLayer
from flexq_bench.kernels.decoder.operations import (
    AttentionShape,
    DecoderOperations,
    Destination,
    HeadNorms,
    Norm,
    WeightedRows,
)

# Backends that support a mask, without cuDNN's: its plan per shape takes longer than it saves.
_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PromptAttention(DecoderOperations):
    """Attention of prompts by torch's, on any device."""

    def attend_prompts(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        slots: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        batch, tokens = qkv.shape[:2]
        queries, keys, values = split_heads(qkv, shape, positions)
        cache.write(keys, values, slots, positions)
        cached = cache.read(slots, longest)
        group = shape.heads // shape.kv_heads
        k, v = cached if group == 1 else cached.repeat_interleave(group, dim=2)
        q = queries.transpose(1, 2)
        mask = torch.arange(longest, device=qkv.device) <= positions[:, None, :, None]
        if not q.is_cuda:
            q, k, v = q.float(), k.float(), v.float()
        with sdpa_kernel(_WITH_MASK):
            out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.half().transpose(1, 2).reshape(batch * tokens, -1)


class TorchOperations(PromptAttention):
    """Operators computed in FP32, with results rounded to FP16."""

    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | WeightedRows | None,
        norm: Norm,
        to: Destination,
    ) -> torch.Tensor:
        assert not isinstance(delta, WeightedRows)
        total = residual if delta is None else residual + delta
        _activate(normalized(total, norm), to)
        return total

    def silu_mul(self, gate_up: torch.Tensor, to: Destination) -> None:
        gate, up = gate_up.chunk(2, dim=1)
        silu = functional.silu(gate.float()).half()
        _activate((silu.float() * up.float()).half(), to)

    def relu(self, x: torch.Tensor, to: Destination) -> None:
        _activate(x.clamp(min=0), to)

    def norm_heads(self, qkv: torch.Tensor, shape: AttentionShape, norms: HeadNorms) -> None:
        heads = qkv.view(qkv.shape[0], -1, shape.head_dim)
        queries, keys = heads[:, : shape.heads], heads[:, shape.heads : -shape.kv_heads]
        for part, weight in ((queries, norms.queries), (keys, norms.keys)):
            part.copy_(normalized(part, Norm(weight, None, norms.eps)))

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
        if norms is not None:
            self.norm_heads(qkv, shape, norms)
        batch = qkv.shape[0]
        rows = torch.arange(batch, device=qkv.device)
        queries, keys, values = split_heads(qkv[:, None], shape, positions[:, None])
        cache.write(keys, values, rows, positions[:, None])
        scales = None if cache.scales is None else cache.scales[:, :batch, :, :longest]
        cached = kv.decode(cache.codes[:, :batch, :, :longest], scales, cache.bits)
        k, v = cached.repeat_interleave(shape.heads // shape.kv_heads, dim=2)
        scores = queries.float().transpose(1, 2) @ k.transpose(2, 3) * shape.head_dim**-0.5
        later = torch.arange(longest, device=qkv.device) > positions[:, None]
        scores = scores.masked_fill(later[:, None, None], -torch.inf)
        out = torch.softmax(scores, dim=-1) @ v
        _activate(out.half().reshape(batch, -1), to)

    def pick(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
    ) -> None:
        chosen = logits.argmax(dim=1)
        tokens.copy_(chosen)
        positions.add_(1).clamp_(max=history.shape[1] - 1)
        history[: len(chosen)].scatter_(1, positions.long()[:, None], chosen[:, None])


def normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the RMS or layer norm of FP16 [..., K], in FP16."""
    values = x.float()
    if norm.bias is not None:
        weight, bias = norm.weight.float(), norm.bias.float()
        return functional.layer_norm(values, x.shape[-1:], weight, bias, norm.eps).half()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.eps)
    return ((values * inverse).half().float() * norm.weight.float()).half()


def split_heads(
    qkv: torch.Tensor, shape: AttentionShape, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split qkv [B, T, width] into rotated FP16 queries, keys and values [B, T, heads, head_dim].

    positions: int [B, T].
    """
    heads = qkv.reshape(*qkv.shape[:-1], -1, shape.head_dim)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    queries, keys, values = torch.split(heads, sizes, dim=2)
    if shape.rotary is not None:
        angles = shape.rotary[positions][:, :, None]
        queries, keys = _rotate(queries, angles), _rotate(keys, angles)
    return queries, keys, values


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate x: elements i and i + head_dim / 2 form one complex number."""
    cosine, sine = angles.unbind(dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(rotated, dim=-1).half()


def _activate(x: torch.Tensor, to: Destination) -> None:
    to.kernel.activate(x, to.packed)

"""The operators in torch, on any device: the CPU implementation and the reference of the CUDA one.

Values are rounded to FP16 where `transformers` rounds them in an FP16 model.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.decoder import kv
from kernels.decoder.kv import KvLayer
from kernels.decoder.operations import (
    AttentionShape,
    DecoderOperations,
    Destination,
    HeadNorms,
    Norm,
)

# Those that take a mask. cuDNN's makes a plan for each shape, which takes longer than it saves.
_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TorchOperations(DecoderOperations):
    """Every operation in FP32 between roundings."""

    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, norm: Norm, to: Destination
    ) -> torch.Tensor:
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
    ) -> None:
        batch = qkv.shape[0]
        rows = torch.arange(batch, device=qkv.device)
        queries, keys, values = split_heads(qkv[:, None], shape, positions[:, None])
        cache.write(keys, values, rows, positions[:, None])
        scales = None if cache.scales is None else cache.scales[:, :batch, :, :longest]
        kept = kv.decode(cache.codes[:, :batch, :, :longest], scales, cache.bits)
        k, v = kept.repeat_interleave(shape.heads // shape.kv_heads, dim=2)
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
    """RMS or layer norm of FP16 [..., K], FP16."""
    values = x.float()
    if norm.bias is not None:
        weight, bias = norm.weight.float(), norm.bias.float()
        return functional.layer_norm(values, x.shape[-1:], weight, bias, norm.eps).half()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.eps)
    return ((values * inverse).half().float() * norm.weight.float()).half()


def split_heads(
    qkv: torch.Tensor, shape: AttentionShape, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [B, T, heads, head_dim] of qkv [B, T, width], rotated, FP16.

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
    """Element i and element i + head_dim / 2 are one complex number."""
    cosine, sine = angles.unbind(dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).half()


def attend_prompts(
    qkv: torch.Tensor,
    shape: AttentionShape,
    cache: KvLayer,
    slots: torch.Tensor,
    positions: torch.Tensor,
    longest: int,
) -> torch.Tensor:
    """Causal attention of a piece of each prompt, behind what the cache has of it already.

    qkv: FP16 [B, T, width], pieces padded at their ends to T tokens; what lies past a piece's end
    is written too, and overwritten before it is ever read. slots: int64 [B], where keys and values
    go. positions: int64 [B, T]. longest: no piece ends later.
    Returns FP16 [B · T, heads · head_dim].
    """
    batch, tokens = qkv.shape[:2]
    queries, keys, values = split_heads(qkv, shape, positions)
    cache.write(keys, values, slots, positions)
    kept = cache.read(slots, longest)
    share = shape.heads // shape.kv_heads
    k, v = kept if share == 1 else kept.repeat_interleave(share, dim=2)
    q = queries.transpose(1, 2)
    seen = torch.arange(longest, device=qkv.device) <= positions[:, None, :, None]
    if not q.is_cuda:
        q, k, v = q.float(), k.float(), v.float()
    with sdpa_kernel(_WITH_MASK):
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out.half().transpose(1, 2).reshape(batch * tokens, -1)


def _activate(x: torch.Tensor, to: Destination) -> None:
    to.kernel.activate(x, to.packed)

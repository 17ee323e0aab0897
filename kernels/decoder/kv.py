"""Keys and values of one layer: FP16, or asymmetric codes of 8 or 4 bits a token and head.

x = code * step + least with both in FP16, as Atom quantizes its KV cache (arXiv 2310.19102, section
4.4). csrc/decode_attention.cu writes and reads the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import ShapeError

KV_BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class KvLayer:
    """keys, values: uint8 [slots, KV heads, capacity, bytes of a token and head].

    key_scales, value_scales: FP16 [slots, KV heads, capacity, 2], step and least; None: FP16.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    bits: int

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    @property
    def slots(self) -> int:
        return self.keys.shape[0]


def token_bytes(head_dim: int, bits: int) -> int:
    """Bytes of the keys, or of the values, of one token and head."""
    return head_dim * bits // 8 + (0 if bits == 16 else 4)


def empty_layer(
    slots: int, kv_heads: int, capacity: int, head_dim: int, bits: int, device: torch.device
) -> KvLayer:
    """A cache of zeros. Raises ShapeError for a width that is not in KV_BITS."""
    if bits not in KV_BITS:
        raise ShapeError(f"a KV cache has 16, 8 or 4 bits, got {bits}")
    shape = (slots, kv_heads, capacity, head_dim * bits // 8)
    keys, values = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
    if bits == 16:
        return KvLayer(keys, values, None, None, bits)
    key_scales, value_scales = (
        torch.zeros(*shape[:3], 2, dtype=torch.float16, device=device) for _ in range(2)
    )
    return KvLayer(keys, values, key_scales, value_scales, bits)


def encode(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """FP16 [..., head_dim] as bytes [..., bytes] and their scales [..., 2] (None: FP16)."""
    if bits == 16:
        return x.contiguous().view(torch.uint8), None
    top = (1 << bits) - 1
    least = x.amin(dim=-1, keepdim=True)
    step = ((x.amax(dim=-1, keepdim=True).float() - least.float()) / top).half()
    divisor = torch.where(step == 0, torch.inf, step.float())
    codes = ((x.float() - least.float()) / divisor).round().clamp(0, top).to(torch.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, torch.cat([step, least], dim=-1)


def decode(codes: torch.Tensor, scales: torch.Tensor | None, bits: int) -> torch.Tensor:
    """What `encode` made of FP16 values, as FP32 [..., head_dim]."""
    if scales is None:
        return codes.view(torch.float16).float()
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes.float() * scales[..., :1].float() + scales[..., 1:].float()

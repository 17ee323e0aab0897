"""KV cache of one layer: FP16, or asymmetric codes of 8 or 4 bits per token and head.

x = code * step + minimum with both in FP16, as in Atom (arXiv 2310.19102, section 4.4).
csrc/decode/attention.cu writes and reads the same bytes. The cache of a model that was quantized
with an FP8 cache has the numbers of E4M3 times a calibrated scale, stored as FP16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats.floats import E4M3

KV_BITS = (16, 8, 4)


@dataclass(frozen=True, slots=True)
class KvLayer:
    """Keys and values of one layer.

    codes: uint8 [2, slots, KV heads, capacity, bytes per token and head], keys before values.
    scales: FP16 [2, slots, KV heads, capacity, 2], step and minimum; None: FP16.
    fp8_scales: FP32 [2, KV heads]: keys and values are rounded to E4M3 times these first; None:
    they are not.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    bits: int
    fp8_scales: torch.Tensor | None = None

    @property
    def keys(self) -> torch.Tensor:
        return self.codes[0]

    @property
    def values(self) -> torch.Tensor:
        return self.codes[1]

    @property
    def key_scales(self) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[0]

    @property
    def value_scales(self) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[1]

    @property
    def capacity(self) -> int:
        return self.codes.shape[3]

    @property
    def slots(self) -> int:
        return self.codes.shape[1]

    def write(
        self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Write FP16 [B, T, KV heads, head_dim] to slots [B] at positions [B, T]."""
        both = torch.stack((keys, values), dim=2)
        if self.fp8_scales is not None:
            both = fp8_rounded(both, self.fp8_scales[..., None])
        codes, scales = encode(both, self.bits)
        self.codes[:, slots[:, None], :, positions] = codes
        if self.scales is not None and scales is not None:
            self.scales[:, slots[:, None], :, positions] = scales

    def read(self, slots: torch.Tensor, longest: int) -> torch.Tensor:
        """Read `longest` positions of slots [B]: FP16 [2, B, KV heads, longest, head_dim]."""
        codes = self.codes[:, :, :, :longest].index_select(1, slots)
        if self.scales is None:
            return codes.view(torch.float16)
        return decode(
            codes, self.scales[:, :, :, :longest].index_select(1, slots), self.bits
        ).half()


def token_bytes(head_dim: int, bits: int) -> int:
    """Return the bytes of the key (or value) of one token and head."""
    return head_dim * bits // 8 + (0 if bits == 16 else 4)


def fp8_rounded(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Round FP16 to the nearest E4M3 times a scale, FP16; beyond the largest one it saturates.

    scales: FP32, of a shape that broadcasts.
    """
    numbers = E4M3.nearest(x.float() / scales).float()
    return (numbers * scales).half()


def empty_layer(
    slots: int,
    kv_heads: int,
    capacity: int,
    head_dim: int,
    bits: int,
    device: torch.device,
    fp8_scales: torch.Tensor | None = None,
) -> KvLayer:
    """Allocate a cache of zeros. fp8_scales: as in KvLayer.

    Raises ShapeError for bits that are not in KV_BITS, and for codes of FP8 numbers.
    """
    if bits not in KV_BITS:
        raise ShapeError(f"a KV cache has 16, 8 or 4 bits, got {bits}")
    if fp8_scales is not None and bits != max(KV_BITS):
        raise ShapeError(
            f"this model's cache has FP8 numbers, which are not rounded to {bits} bits: leave out "
            "--kv-bits"
        )
    shape = (2, slots, kv_heads, capacity)
    codes = torch.zeros(*shape, head_dim * bits // 8, dtype=torch.uint8, device=device)
    scales = None if bits == 16 else torch.zeros(*shape, 2, dtype=torch.float16, device=device)
    return KvLayer(codes, scales, bits, fp8_scales)


def encode(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Encode FP16 [..., head_dim] as bytes [..., bytes] and scales [..., 2] (None: FP16).

    Uses few operations, because launches dominate the time of a short prompt.
    """
    if bits == 16:
        return x.contiguous().view(torch.uint8), None
    top = (1 << bits) - 1
    values = x.float()
    minimum, maximum = values.aminmax(dim=-1, keepdim=True)
    scales = torch.cat([(maximum - minimum) / top, minimum], dim=-1).half()
    step = scales[..., :1].float()
    divisor = torch.where(step == 0, torch.inf, step)
    codes = values.sub_(minimum).div_(divisor).round_().clamp_(0, top).to(torch.uint8)
    if bits == 4:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes, scales


def decode(codes: torch.Tensor, scales: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Decode the output of `encode` to FP32 values [..., head_dim]."""
    if scales is None:
        return codes.view(torch.float16).float()
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    factors = scales.float()
    return codes.float().mul_(factors[..., :1]).add_(factors[..., 1:])

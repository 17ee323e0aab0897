"""KV cache for evaluation that rounds keys and values like decode's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder.kv import decode, encode, fp8_rounded
from flexq_bench.kernels.formats.floats import E4M3

FULL_KV_BITS = 16  # bits of keys and values that are not quantized
_MIN_SCALE = 2.0**-24  # of zeros


class QuantizedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that returns keys and values rounded to the codes of kernels.decoder.kv.

    They are rounded to FP16 and then, per token and head, to codes of 8 or 4 bits; keys after the
    rotary embedding, as transformers passes them to a cache. As in decode, attention reads the
    rounded values, including those of the current tokens.
    """

    def __init__(
        self, config: Any, bits: int, fp8_scales: Sequence[torch.Tensor] | None = None
    ) -> None:
        """config: of the model. bits: 16, 8 or 4. fp8_scales: of each layer, as in KvLayer; of 0:
        those that fit the keys and values of each pass.
        """
        super().__init__(config=config)
        self._bits = bits
        self._fp8_scales = fp8_scales

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *arguments: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [batch, KV heads, T, head_dim] of a layer; returns all so far."""
        of_layer = None if self._fp8_scales is None else self._fp8_scales[layer_idx]
        of_keys, of_values = (None, None) if of_layer is None else of_layer.unbind()
        keys, values = self._rounded(key_states, of_keys), self._rounded(value_states, of_values)
        all_states: tuple[torch.Tensor, torch.Tensor] = super().update(
            keys, values, layer_idx, *arguments, **named
        )
        return all_states

    def _rounded(self, states: torch.Tensor, scales_of_heads: torch.Tensor | None) -> torch.Tensor:
        halves = states.to(torch.float16)
        if scales_of_heads is not None:
            stored = scales_of_heads.to(halves.device)[:, None, None]
            fitting = (halves.abs().max().float() / E4M3.largest).clamp(min=_MIN_SCALE)
            halves = fp8_rounded(halves, torch.where(stored > 0, stored, fitting))
        codes, scales = encode(halves, self._bits)
        return decode(codes, scales, self._bits).to(torch.float16).to(states.dtype)


def quantize_cache(
    model: nn.Module, bits: int, fp8_scales: Sequence[torch.Tensor] | None = None
) -> None:
    """Let every forward pass of a transformers model use a QuantizedCache.

    bits: 16 without fp8_scales (as in QuantizedCache) leaves the model unchanged. The model then
    raises UsageError for a cache of another class that contains tokens.
    """
    if bits == FULL_KV_BITS and fp8_scales is None:
        return

    def give(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = named.get("past_key_values")
        if isinstance(cache, QuantizedCache):
            return arguments, named
        if cache is not None and cache.get_seq_length() > 0:
            raise UsageError(f"a model with a cache of {bits} bits was given another cache")
        return arguments, {
            **named,
            "past_key_values": QuantizedCache(module.config, bits, fp8_scales),
        }

    model.register_forward_pre_hook(give, with_kwargs=True)

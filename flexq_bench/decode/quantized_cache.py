"""KV cache for evaluation that rounds keys and values like decode's KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder.kv import decode, encode

FULL_KV_BITS = 16  # bits of keys and values that are not quantized


class QuantizedCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache that returns keys and values rounded to the codes of kernels.decoder.kv.

    They are rounded to FP16 and then, per token and head, to codes of 8 or 4 bits; keys after the
    rotary embedding, as transformers passes them to a cache. As in decode, attention reads the
    rounded values, including those of the current tokens.
    """

    def __init__(self, config: Any, bits: int) -> None:
        """config: of the model. bits: 8 or 4."""
        super().__init__(config=config)
        self._bits = bits

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *arguments: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values [batch, KV heads, T, head_dim] of a layer; returns all so far."""
        keys, values = self._rounded(key_states), self._rounded(value_states)
        all_states: tuple[torch.Tensor, torch.Tensor] = super().update(
            keys, values, layer_idx, *arguments, **named
        )
        return all_states

    def _rounded(self, states: torch.Tensor) -> torch.Tensor:
        codes, scales = encode(states.to(torch.float16), self._bits)
        return decode(codes, scales, self._bits).to(torch.float16).to(states.dtype)


def quantize_cache(model: nn.Module, bits: int) -> None:
    """Let every forward pass of a transformers model use a QuantizedCache.

    bits: 16 leaves the model unchanged. The model then raises UsageError for a cache of another
    class that contains tokens.
    """
    if bits == FULL_KV_BITS:
        return

    def give(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = named.get("past_key_values")
        if isinstance(cache, QuantizedCache):
            return arguments, named
        if cache is not None and cache.get_seq_length() > 0:
            raise UsageError(f"a model with a cache of {bits} bits was given another cache")
        return arguments, {**named, "past_key_values": QuantizedCache(module.config, bits)}

    model.register_forward_pre_hook(give, with_kwargs=True)

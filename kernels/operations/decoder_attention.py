"""Attention of a decode step as a decoder runs it: rotated, written to the cache, then attended.

`qkv` has the queries, keys and values of the new token of each sequence, at position
`context - 1`; what the sequence's slot of the cache has there is overwritten, rounded if the cache
has codes (Atom, arXiv 2310.19102, section 4.4).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexq_bench.kernels.operations._attention import (
    angles,
    attended_sequences,
    changes_by_rotated,
    rotated,
)
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch

    from flexq_bench.kernels.formats import NumberFormat


def _draw(values: Mapping[str, Value], generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    context, device = int(values["context"]), generator.device
    return {
        "rotary": angles(context, int(values["head_dim"]), device),
        "position": torch.full((int(values["batch"]),), context - 1, device=device),
    }


def _reference(
    qkv: torch.Tensor,
    rotary: torch.Tensor,
    position: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    heads: int,
    kv_heads: int,
    context: int,
    cache: NumberFormat | None = None,
) -> dict[str, Any]:
    import torch

    of_heads = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = of_heads[:, :heads], of_heads[:, heads:-kv_heads], of_heads[:, -kv_heads:]
    at = rotary[position.long()]
    q, k = rotated(q, at), rotated(k, at)
    if cache is not None and not cache.is_dense:
        k, v = _rounded(k.half().double(), cache.bits), _rounded(v, cache.bits)
        k_cache, v_cache = _with_rounded_minima(k_cache), _with_rounded_minima(v_cache)
    keys, values = (
        [torch.cat([earlier[:-1], own[None]]) for earlier, own in zip(cache, new, strict=True)]
        for cache, new in ((k_cache, k), (v_cache, v))
    )
    y, magnitude = attended_sequences(q[:, None], keys, values, past=context - 1)
    changes = map(changes_by_rotated, q, keys, values, y[:, 0])
    return {"y": (y.flatten(1), magnitude.flatten(1), torch.stack(list(changes)).flatten(1))}


def _rounded(new: torch.Tensor, bits: int) -> torch.Tensor:
    """Keys or values of each head as a cache of codes stores them: between their extremes."""
    low, high = (end.half().double() for end in new.aminmax(dim=-1, keepdim=True))
    step = ((high - low) / (2**bits - 1)).half().double().clamp_min(2.0**-24)
    rounded: torch.Tensor = ((new - low) / step).round().clamp(0, 2**bits - 1) * step + low
    return rounded


def _with_rounded_minima(cached: torch.Tensor) -> torch.Tensor:
    """Values whose codes count from a minimum in FP16: the smallest of a head has code 0."""
    low = cached.amin(dim=-1, keepdim=True)
    as_stored: torch.Tensor = cached + (low.half().double() - low)
    return as_stored


_CACHE = ("batch", "context", "kv_heads", "head_dim")

OPERATION = Operation(
    name="decoder_attention",
    summary="attention of a decode step, with the rotary embedding and the write to the cache",
    parameters=(
        Parameter("batch", "sequences", is_axis=True),
        Parameter("context", "tokens of a sequence, with the new one", is_axis=True),
        Parameter("heads", "query heads"),
        Parameter("kv_heads", "heads of keys and values"),
        Parameter("head_dim", "features of a head", default=128),
    ),
    inputs=(
        Input("qkv", ("batch", "(heads + 2 * kv_heads) * head_dim"), "dtype", "activation"),
        Input("rotary", ("context", "head_dim // 2", "2"), "fp32", "activation"),
        Input("position", ("batch",), "int32", "index"),
        Input("k_cache", _CACHE, "cache", "state"),
        Input("v_cache", _CACHE, "cache", "state"),
    ),
    outputs=(Output("y", ("batch", "heads * head_dim"), "dtype"),),
    bytes="2 * cache_bytes(batch * context * kv_heads, head_dim)",
    operations="4 * batch * heads * context * head_dim",
    reference=_reference,
    draw=_draw,
)

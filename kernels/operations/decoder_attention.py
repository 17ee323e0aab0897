"""Attention of a decode step as a decoder runs it: rotated, written to the cache, then attended.

`qkv` has the queries, keys and values of the new token of each sequence, at position
`context - 1`; what the sequence's slot of the cache has there is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexq_bench.kernels.operations._attention import angles, attended_sequences, rotated
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch


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
) -> dict[str, Any]:
    import torch

    of_heads = qkv.view(len(qkv), heads + 2 * kv_heads, -1)
    q, k, v = of_heads[:, :heads], of_heads[:, heads:-kv_heads], of_heads[:, -kv_heads:]
    at = rotary[position.long()]
    q, k = rotated(q, at), rotated(k, at)
    of_each = (
        (torch.cat([earlier[:-1], own[None]]) for earlier, own in zip(cache, new, strict=True))
        for cache, new in ((k_cache, k), (v_cache, v))
    )
    y, magnitude = attended_sequences(q[:, None], *of_each, past=context - 1)
    return {"y": (y.flatten(1), magnitude.flatten(1))}


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

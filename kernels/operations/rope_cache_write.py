"""Rotary embedding of queries and keys, with keys and values written to the cache.

The two halves of a head are the parts of its complex numbers (as in GPT-NeoX). Slots of the cache
that no token is written to may have any contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexq_bench.kernels.operations._attention import angles, rotated
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch


def _draw(values: Mapping[str, Value], generator: torch.Generator) -> dict[str, torch.Tensor]:
    import torch

    device, slots = generator.device, int(values["slots"])
    order = torch.randperm(slots, generator=generator, device=device)
    return {
        "slot": order[: int(values["tokens"])].int(),
        "rotary": angles(slots, int(values["head_dim"]), device),
    }


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    slots: int,
) -> dict[str, Any]:
    import torch

    at = rotary[position.long()]

    def written(rows: torch.Tensor) -> torch.Tensor:
        cache = torch.full((slots, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=q.device)
        cache[slot.long()] = rows
        return cache

    return {"q_rotated": rotated(q, at), "k_cache": written(rotated(k, at)), "v_cache": written(v)}


_CACHE = ("slots", "kv_heads", "head_dim")

OPERATION = Operation(
    name="rope_cache_write",
    summary="rotary embedding of queries and keys; keys and values are written to a cache",
    parameters=(
        Parameter("tokens", "tokens", is_axis=True),
        Parameter("heads", "query heads"),
        Parameter("kv_heads", "heads of keys and values"),
        Parameter("head_dim", "features of a head", default=128),
        Parameter("slots", "tokens that the cache holds", default=4096),
    ),
    inputs=(
        Input("q", ("tokens", "heads", "head_dim"), "dtype", "activation"),
        Input("k", ("tokens", "kv_heads", "head_dim"), "dtype", "activation"),
        Input("v", ("tokens", "kv_heads", "head_dim"), "dtype", "activation"),
        Input("rotary", ("slots", "head_dim // 2", "2"), "fp32", "activation"),
        Input("position", ("tokens",), "int32", "index", "below slots"),
        Input("slot", ("tokens",), "int32", "index"),
    ),
    outputs=(
        Output("q_rotated", ("tokens", "heads", "head_dim"), "dtype"),
        Output("k_cache", _CACHE, "cache"),
        Output("v_cache", _CACHE, "cache"),
    ),
    bytes=(
        "dtype_bytes(tokens * (2 * heads + 2 * kv_heads), head_dim)"
        " + 2 * cache_bytes(tokens * kv_heads, head_dim)"
    ),
    operations="3 * tokens * (heads + kv_heads) * head_dim",
    reference=_reference,
    draw=_draw,
)

"""Attention of one new token per sequence over its cached keys and values, with grouped heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flexq_bench.kernels.operations._attention import (
    attended_sequences,
    cache_inputs,
    draw_blocks,
    heads_parameters,
    of_sequences,
)
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch


def _draw(values: Mapping[str, Value], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return draw_blocks("context", values, generator)


def _reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context: int,
) -> dict[str, Any]:
    of_each = (of_sequences(cache, block_table, context) for cache in (k_cache, v_cache))
    y, magnitude = attended_sequences(q[:, None], *of_each, past=context - 1)
    return {"y": (y[:, 0], magnitude[:, 0])}


OPERATION = Operation(
    name="attention_decode",
    summary="attention of one new token per sequence over a cache of keys and values",
    parameters=(
        Parameter("batch", "sequences", is_axis=True),
        Parameter("context", "tokens of a sequence", is_axis=True),
        *heads_parameters(),
    ),
    inputs=(
        Input("q", ("batch", "heads", "head_dim"), "dtype", "activation"),
        *cache_inputs("context"),
    ),
    outputs=(Output("y", ("batch", "heads", "head_dim"), "dtype"),),
    bytes="2 * cache_bytes(batch * context * kv_heads, head_dim)",
    operations="4 * batch * heads * context * head_dim",
    reference=_reference,
    draw=_draw,
)

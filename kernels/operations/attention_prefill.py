"""Causal attention of the tokens of a prompt, whose keys and values are in the cache already."""

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

_LENGTH = "past + tokens"


def _draw(values: Mapping[str, Value], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return draw_blocks(_LENGTH, values, generator)


def _reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    past: int,
    tokens: int,
) -> dict[str, Any]:
    of_each = (of_sequences(cache, block_table, past + tokens) for cache in (k_cache, v_cache))
    return {"y": attended_sequences(q, *of_each, past=past)}


OPERATION = Operation(
    name="attention_prefill",
    summary="causal attention of a prompt's tokens over a cache of keys and values",
    parameters=(
        Parameter("tokens", "new tokens of a sequence", is_axis=True),
        Parameter("batch", "sequences", default=1, is_axis=True),
        Parameter("past", "tokens of a sequence before the new ones", minimum=0, default=0),
        *heads_parameters(),
    ),
    inputs=(
        Input("q", ("batch", "tokens", "heads", "head_dim"), "dtype", "activation"),
        *cache_inputs(_LENGTH),
    ),
    outputs=(Output("y", ("batch", "tokens", "heads", "head_dim"), "dtype"),),
    bytes=(
        f"2 * cache_bytes(batch * ({_LENGTH}) * kv_heads, head_dim)"
        " + 2 * dtype_bytes(batch * tokens * heads, head_dim)"
    ),
    # A token sees itself and all before it.
    operations="4 * batch * heads * head_dim * (tokens * past + tokens * (tokens + 1) / 2)",
    reference=_reference,
    draw=_draw,
)

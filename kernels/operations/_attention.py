"""Parts of definitions of attention over a cache of keys and values, paged or contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from flexq_bench.workloads.expressions import Value, evaluate
from flexq_bench.workloads.operation import Input, Parameter

if TYPE_CHECKING:
    import torch

_BASE = 10000.0  # of the rotary embedding


def heads_parameters() -> tuple[Parameter, ...]:
    return (
        Parameter("heads", "query heads"),
        Parameter("kv_heads", "heads of keys and values"),
        Parameter("head_dim", "features of a head", default=128),
        Parameter(
            "layout",
            "blocks of tokens anywhere in the cache, or one block a sequence",
            default="paged",
            choices=("paged", "contiguous"),
        ),
        Parameter("block", "tokens of a block of a paged cache", default=16),
    )


def cache_inputs(length: str) -> tuple[Input, ...]:
    """Inputs of a cache of sequences of so many tokens (an expression)."""
    block = _block(length)
    shape = (f"batch * ceil(({length}) / ({block}))", block, "kv_heads", "head_dim")
    return (
        Input("k_cache", shape, "cache", "state"),
        Input("v_cache", shape, "cache", "state"),
        Input("block_table", ("batch", f"ceil(({length}) / ({block}))"), "int32", "index"),
    )


def draw_blocks(
    length: str, values: Mapping[str, Value], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The blocks of each sequence, in random order; of a contiguous cache block i is sequence i."""
    import torch

    of_each = int(evaluate(f"ceil(({length}) / ({_block(length)}))", values))
    batch, device = int(values["batch"]), generator.device
    order = torch.arange(batch * of_each, device=device)
    if values["layout"] == "paged":
        order = torch.randperm(batch * of_each, generator=generator, device=device)
    return {"block_table": order.view(batch, of_each).int()}


def attended_sequences(
    q: torch.Tensor, keys: Iterable[torch.Tensor], values: Iterable[torch.Tensor], *, past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence in float64, and the sums of its terms' magnitudes.

    q [batch, tokens, heads, dim]; keys, values: of each sequence, [length, kv_heads, dim]. Token i
    sees the first past + i + 1. An error e of a score s adds e p (v - y) to y; scores are sums as
    well, so their terms' magnitudes count as e.
    """
    import torch

    of_each = [_attended(*parts, past) for parts in zip(q, keys, values, strict=True)]
    y, magnitude = (torch.stack(parts) for parts in zip(*of_each, strict=True))
    return y, magnitude


def changes_by_rotated(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Changes of y if each feature of q, and of the last key, changes by its own magnitude.

    q, y [heads, dim]; keys, values [length, kv_heads, dim]. Root sums of squares, [heads, dim].
    """
    import torch

    changes, shared = torch.empty_like(q), len(q) // keys.shape[1]
    for head in range(len(q)):
        k, v = keys[:, head // shared], values[:, head // shared] - y[head]
        products = q[head] * k / q.shape[1] ** 0.5
        moves = products.sum(dim=1).softmax(dim=0)[:, None] * v
        of_last = (products[-1].square().sum() * moves[-1].square()).sqrt()
        changes[head] = torch.hypot((products.T @ moves).norm(dim=0), of_last)
    return changes


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence; see attended_sequences."""
    import torch

    tokens, heads, dim = q.shape
    y, magnitude = torch.empty_like(q), torch.empty_like(q)
    shared = heads // k.shape[1]
    seen = torch.arange(len(k), device=q.device)[None, :] <= (
        past + torch.arange(tokens, device=q.device)[:, None]
    )
    for head in range(heads):  # one at a time: scores of all would not fit
        keys, values = k[:, head // shared], v[:, head // shared]
        scores = (q[:, head] @ keys.T) / dim**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        y_head = y[:, head] = weights @ values
        errors = weights * (q[:, head].abs() @ keys.abs().T) / dim**0.5
        of_scores = errors @ values.abs() + errors.sum(dim=1, keepdim=True) * y_head.abs()
        magnitude[:, head] = weights @ values.abs() + of_scores
    return y, magnitude


def angles(positions: int, head_dim: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of the rotary embedding, [positions, head_dim / 2, 2]."""
    import torch

    half = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    rates = _BASE ** (-half / len(half))
    of_positions = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * rates
    return torch.stack([of_positions.cos(), of_positions.sin()], dim=-1)


def rotated(heads: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rotate heads [tokens, heads, dim], whose halves are the parts of complex numbers.

    at: the angles of each token's position, [tokens, dim / 2, 2].
    """
    import torch

    cos, sin = at[:, None].unbind(-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def of_sequences(
    cache: torch.Tensor, block_table: torch.Tensor, length: int
) -> Iterator[torch.Tensor]:
    """The keys or values of each sequence, [length, kv_heads, dim]."""
    return (cache[blocks.long()].flatten(0, 1)[:length] for blocks in block_table)


def _block(length: str) -> str:
    return f"block if layout == 'paged' else {length}"

"""Linear layers of the experts of a mixture, each for the tokens that were routed to it.

`sizes` has the number of rows of each expert. Rows are sorted by expert: one after the other
(contiguous), or from `expert * tokens` on, with unused rows after them (masked).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flexq_bench.workloads.expressions import Value, evaluate
from flexq_bench.workloads.operation import Input, Operation, Output, Parameter

if TYPE_CHECKING:
    import torch

# Experts with at least one token, if assignments are drawn independently: the busiest eighth of the
# experts gets its share, the others the rest.
_HOT = "ceil(experts / 8)"
_SHARE = f"({_HOT} / experts + min(skew, 100) / 100 * (1 - {_HOT} / experts))"
_OF_HOT = f"{_HOT} * (1 - (1 - {_SHARE} / {_HOT}) ** (tokens * top_k))"
_OTHERS = f"(experts - {_HOT})"
_OF_OTHERS = f"{_OTHERS} * (1 - (1 - (1 - {_SHARE}) / max(1, {_OTHERS})) ** (tokens * top_k))"
TOUCHED = f"min(experts, tokens * top_k, max(top_k, floor({_OF_HOT} + {_OF_OTHERS} + 1 / 2)))"


def _draw(values: Mapping[str, Value], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Route tokens: TOUCHED experts get one or more, at most `tokens`."""
    import torch

    device = generator.device
    experts, tokens = int(values["experts"]), int(values["tokens"])
    touched = int(evaluate(TOUCHED, values))
    hot = int(evaluate(_HOT, values))
    share = float(evaluate(_SHARE, values))
    weights = torch.full((experts,), (1 - share) / max(1, experts - hot), device=device)
    weights[:hot] = share / hot
    weights = weights.clamp(min=1e-9)[torch.randperm(experts, generator=generator, device=device)]
    chosen = torch.multinomial(weights, touched, generator=generator)
    sizes = torch.zeros(experts, dtype=torch.int32, device=device)
    sizes[chosen] = 1
    while (missing := tokens * int(values["top_k"]) - int(sizes.sum())) > 0:
        open_ = weights.double() * ((sizes > 0) & (sizes < tokens))
        drawn = torch.multinomial(open_, missing, replacement=True, generator=generator)
        sizes += torch.bincount(drawn, minlength=experts).int()
        sizes.clamp_(max=tokens)
    return {"sizes": sizes}


def rows_of_experts(sizes: torch.Tensor, tokens: int, layout: str) -> Iterator[slice]:
    """Return the rows of each expert in turn; sizes are read from their device."""
    start = 0
    for expert, size in enumerate(sizes.tolist()):
        if layout == "masked":
            start = expert * tokens
        yield slice(start, start + size)
        start += size


def _reference(
    x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, tokens: int, layout: str
) -> dict[str, Any]:
    import torch

    y = torch.full((len(x), w.shape[1]), torch.nan, dtype=torch.float64, device=x.device)
    magnitude = torch.zeros_like(y)
    for expert, rows in enumerate(rows_of_experts(sizes, tokens, layout)):
        y[rows] = x[rows] @ w[expert].T
        magnitude[rows] = x[rows].abs() @ w[expert].abs().T
    return {"y": (y, magnitude)}


_ROWS = "experts * tokens if layout == 'masked' else tokens * top_k"

OPERATION = Operation(
    name="grouped_linear",
    summary="a linear layer of each expert, Y = X·W[expert]^T for the rows routed to it",
    parameters=(
        Parameter("tokens", "tokens", is_axis=True),
        Parameter("experts", "experts of the layer"),
        Parameter("top_k", "experts of a token"),
        Parameter("n", "output features of an expert"),
        Parameter("k", "input features of an expert"),
        Parameter(
            "skew",
            "percent of the other experts' tokens that the busiest eighth gets instead",
            minimum=0,
            default=0,
            is_axis=True,
        ),
        Parameter(
            "layout",
            "rows one after the other, or from expert * tokens on",
            default="contiguous",
            choices=("contiguous", "masked"),
        ),
    ),
    inputs=(
        Input("x", (_ROWS, "k"), "activation", "activation", "outliers"),
        Input("w", ("experts", "n", "k"), "weight", "weight", "weight"),
        Input("sizes", ("experts",), "int32", "index"),
    ),
    outputs=(Output("y", (_ROWS, "n"), "dtype"),),
    bytes=f"weight_bytes({TOUCHED} * n, k)",
    operations="2 * tokens * top_k * n * k",
    reference=_reference,
    draw=_draw,
)

"""Sensitivity of the model to rounding each single layer's inputs, from one backward pass.

The criterion is the Kullback-Leibler divergence of the model's predictions from those of the dense
model, to second order. For labels y drawn from the dense model's own predictions, its Hessian is
the Fisher information (Martens, "New insights and perspectives on the natural gradient method",
arXiv:1412.1193, section 9), so that a small change d_t of a layer's output at token t costs

    KL ≈ ½ E_y[ Σ_t (g_t · d_t)² ],   g_t = ∂ log p(y) / ∂ output_t.

Errors of different tokens and layers are assumed to be uncorrelated, so sensitivities of layers
add up. The criterion is exact in the limit of small errors, needs no labels, and costs as much as a
training step. Measuring the divergence with one layer rounded at a time would take a forward pass
per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.activations import DynamicActivation
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.model_map import LinearSite, ModelMap
from flexq_bench.schemes.scheme import Progress

Cost = Literal["layers", "matrices", "work"]
COSTS: tuple[Cost, ...] = ("layers", "matrices", "work")
_ROWS_AT_ONCE = 256  # rows of probabilities that are summed together, in float64


@dataclass(frozen=True, slots=True)
class SiteSensitivity:
    """Divergence that rounding one site's inputs adds, in nats per token.

    low, high: with the format of fewer and of more bits.
    """

    site: LinearSite
    low: float
    high: float

    @property
    def gain(self) -> float:
        """Reduction of the divergence by the format of more bits."""
        return self.low - self.high


def activation_sensitivity(
    model: nn.Module,
    layout: ModelMap,
    calibration: Calibration,
    *,
    low: NumberFormat,
    high: NumberFormat,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> tuple[SiteSensitivity, ...]:
    """Compute the sensitivity of each site's activations in both formats, in forward-pass order.

    The model must be dense and is not changed. Memory: one block's backward pass over a segment,
    and the inputs of each block. Raises QuantizeError with the site's name if inputs can't be
    quantized or gradients overflow.
    """
    sums = {site.name: [0.0, 0.0] for site in layout.sites}
    formats = (DynamicActivation(low), DynamicActivation(high))
    with _frozen(model), _watching(model, layout, formats, sums):
        for index, segment in enumerate(calibration.tokens):
            if progress is not None:
                progress(index, calibration.segments, "sensitivity of each layer's activations")
            _backward(model, segment, generator)
    broken = next((name for name, costs in sums.items() if not math.isfinite(sum(costs))), None)
    if broken is not None:
        raise QuantizeError(
            f"gradients at {broken} leave the range of the model's dtype: load it as bfloat16 or "
            "float32"
        )
    tokens = calibration.tokens.numel()
    return tuple(
        SiteSensitivity(site, sums[site.name][0] / tokens, sums[site.name][1] / tokens)
        for site in layout.sites
    )


def choose_sites(
    sensitivities: Sequence[SiteSensitivity], layout: ModelMap, budget: float, cost: Cost = "layers"
) -> tuple[str, ...]:
    """Return the names of the sites to get more bits: those with the largest gain per extra cost.

    budget: the share of the total cost that may be spent. cost: the unit of choice, and its price:
      layers:   a layer as engines run it costs 1. Sites with the same input (q, k and v; gate and
                up) are one layer, because the format belongs to the input;
      matrices: a site costs 1, whatever the format of other sites with the same input;
      work:     a layer as engines run it costs its products, N · K.

    The choice is greedy; a unit that exceeds the rest of the budget is skipped. Equal gains keep
    the order of the forward pass, which is also the order of the result. Raises QuantizeError if
    the budget is not within 0 and 1.
    """
    if not 0 <= budget <= 1:
        raise QuantizeError(f"a budget is a share of the layers, 0 to 1, got {budget:g}")
    fused = layers_of(sensitivities, layout)
    units = fused if cost != "matrices" else tuple((sensitivity,) for sensitivity in sensitivities)
    prices = [_work(unit) if cost == "work" else 1 for unit in units]
    remaining = budget * sum(prices) + 1e-9  # 0.3 · 210 is a little less than 63 in binary
    chosen: set[str] = set()
    for unit, price in sorted(
        zip(units, prices, strict=True), key=lambda pair: -_gain(pair[0]) / pair[1]
    ):
        if price <= remaining:
            remaining -= price
            chosen.update(sensitivity.site.name for sensitivity in unit)
    return tuple(
        sensitivity.site.name for sensitivity in sensitivities if sensitivity.site.name in chosen
    )


def layers_of(
    sensitivities: Sequence[SiteSensitivity], layout: ModelMap
) -> tuple[tuple[SiteSensitivity, ...], ...]:
    """Group sites by layer as engines run them: sites with the same input are one layer."""
    source = {
        (block, kind): site_input.source
        for block in range(layout.blocks)
        for site_input in layout.inputs_of(block)
        for kind in site_input.kinds
    }
    readers: dict[tuple[int, str], list[SiteSensitivity]] = {}
    for sensitivity in sensitivities:
        block, kind = sensitivity.site.block, sensitivity.site.kind
        readers.setdefault((block, source[block, kind]), []).append(sensitivity)
    return tuple(tuple(together) for together in readers.values())


def _gain(unit: Sequence[SiteSensitivity]) -> float:
    return sum(sensitivity.gain for sensitivity in unit)


def _work(unit: Sequence[SiteSensitivity]) -> int:
    return sum(sensitivity.site.n * sensitivity.site.k for sensitivity in unit)


def _backward(model: nn.Module, segment: torch.Tensor, generator: torch.Generator) -> None:
    """Run a backward pass of log p, for labels drawn from the model's own predictions."""
    decoder: Any = model
    device = next(model.parameters()).device
    embedded = decoder.get_input_embeddings()(segment[None].to(device)).requires_grad_()
    logits = decoder(inputs_embeds=embedded, use_cache=False).logits[0].float()
    logs = functional.log_softmax(logits, dim=-1)
    if not bool(torch.isfinite(logs.detach().sum())):
        raise QuantizeError(
            "the unquantized model predicts NaN: its numbers leave the range of its dtype; load it "
            "as bfloat16 or float32"
        )
    labels = draw(logs.detach(), generator)
    torch.autograd.backward(logs.gather(1, labels[:, None]).sum())


def draw(logs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw a label for each row, int64 [rows], from log probabilities [rows, vocabulary].

    Random numbers are drawn on the CPU, so that a seed gives the same labels on every device,
    except for rounding. The rest is computed on the device of the logs, which are too large to
    move.
    """
    chance = torch.rand(logs.shape[0], 1, generator=generator, dtype=torch.float64)
    labels = []
    for rows, where in zip(
        torch.split(logs, _ROWS_AT_ONCE), torch.split(chance, _ROWS_AT_ONCE), strict=True
    ):
        reached = rows.double().exp().cumsum(dim=-1)
        drawn = torch.searchsorted(reached, where.to(logs.device) * reached[:, -1:], right=True)
        labels.append(drawn[:, 0].clamp(max=logs.shape[1] - 1))
    return torch.cat(labels)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Disable gradients of parameters during the block."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with torch.enable_grad():
            for parameter in learning:
                parameter.requires_grad_(False)
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


@contextmanager
def _watching(
    model: nn.Module,
    layout: ModelMap,
    formats: tuple[DynamicActivation, DynamicActivation],
    sums: dict[str, list[float]],
) -> Iterator[None]:
    """Add (g · d)² / 2 of every site to `sums` in each backward pass within the block.

    A backward pass recomputes each block, so that only the activations of one block are in memory,
    and only the weights of one if the forward pass loads them.
    """

    def hook(site: LinearSite) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        latest: list[torch.Tensor] = []  # of the second forward pass, which is differentiated

        def forward(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            x = arguments[0]
            latest[:] = [x.detach().reshape(-1, site.k)]

            def backward(gradient: torch.Tensor) -> None:
                # d · g = (error of x) · (Wᵀ g), and Wᵀ g is the gradient that reaches this input.
                rows, pulled = latest.pop(), gradient.reshape(-1, site.k).float()
                for index, rounding in enumerate(formats):
                    error = _rounded(site, rows, rounding) - rows.float()
                    costs = (pulled * error).sum(dim=1).double().square()
                    sums[site.name][index] += float(costs.sum()) / 2

            own = x.view_as(x)  # a separate gradient for each site that reads x
            if own.requires_grad:
                own.register_hook(backward)
            return (own, *arguments[1:])

        return forward

    handles = [
        model.get_submodule(site.name).register_forward_pre_hook(hook(site))
        for site in layout.sites
    ]
    blocks = [layout.block_module(model, block) for block in range(layout.blocks)]
    names = [f"{layout.path}.{block}" for block in range(layout.blocks)]
    try:
        for name, block in zip(names, blocks, strict=True):
            replace_module(model, name, _Recomputed(block))
        yield
    finally:
        for name, block in zip(names, blocks, strict=True):
            replace_module(model, name, block)
        for handle in handles:
            handle.remove()


class _Recomputed(nn.Module):
    """A block that stores nothing for its backward pass, and is recomputed there."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return checkpoint(
            self.block, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords
        )


def _rounded(site: LinearSite, rows: torch.Tensor, rounding: DynamicActivation) -> torch.Tensor:
    try:
        return rounding(rows)
    except ValueError as error:
        raise QuantizeError(f"{site.name}: {error}") from error

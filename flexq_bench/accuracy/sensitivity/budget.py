"""8-bit activations for a share of the layers: the choice, and its share of the possible gain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity
from flexq_bench.accuracy.sensitivity.layer_kinds import OnStep, restoring
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.calibration import Calibration
from flexq_bench.schemes.flexq import FlexqOptions, named_sites, paper_choice
from flexq_bench.schemes.layer_sensitivity import (
    Cost,
    SiteSensitivity,
    activation_sensitivity,
    choose_sites,
    layers_of,
)
from flexq_bench.schemes.model_map import ModelMap, map_model
from flexq_bench.schemes.uniform import round_site
from flexq_bench.stats import Interval, gap_closed_interval


@dataclass(frozen=True, slots=True)
class Choice:
    """FlexQ with more bits for the activations of these sites.

    layers, matrices, work: share of the chosen sites among layers as engines run them (q, k and v
    are one, and so are gate and up), among weight matrices, and among products. predicted: share of
    the total gain, as predicted by the sensitivities. closed: (PPL(W6A6) - PPL) / (PPL(W6A6) -
    PPL(W6A8)); None: one segment, or W6A8 is not clearly better.
    """

    name: str
    sites: tuple[str, ...]
    layers: float
    matrices: float
    work: float
    predicted: float
    result: PerplexityResult
    closed: Interval | None


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """Sensitivities of every site. choices: none, all, the paper's, then one for each cost."""

    sensitivities: tuple[SiteSensitivity, ...]
    choices: tuple[Choice, ...]


def try_budget(
    model: nn.Module,
    tokens: torch.Tensor,
    calibration: Calibration,
    budget: float,
    costs: Sequence[Cost],
    *,
    context: int,
    max_tokens: int | None = None,
    options: FlexqOptions | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> BudgetReport:
    """Choose on calibration data, evaluate on tokens [T]; the model is dense again afterwards.

    options: bits and group. Raises QuantizeError if the model has no map or the budget is not
    within 0 and 1, AccuracyError as `perplexity`.
    """
    options = options or FlexqOptions()
    layout = map_model(model)
    sensitivities = activation_sensitivity(
        model,
        layout,
        calibration,
        low=NumberFormat(options.a_bits, options.group),
        high=NumberFormat(options.high_bits, options.group),
        generator=torch.Generator().manual_seed(seed),
        progress=on_step,
    )
    names = _names(options)
    chosen = {
        names[0]: (),
        names[1]: tuple(site.name for site in layout.sites),
        "paper": named_sites(layout, paper_choice(layout)),
    } | {
        f"{budget:g} of {cost}": choose_sites(sensitivities, layout, budget, cost) for cost in costs
    }

    results: dict[str, PerplexityResult] = {}
    for done, (name, sites) in enumerate(chosen.items()):
        if on_step is not None:
            on_step(done, len(chosen), name)
        with restoring(model, layout.sites):
            for site in layout.sites:
                a_bits = options.high_bits if site.name in sites else options.a_bits
                round_site(model, site, options.w_bits, a_bits, options.group)
            results[name] = perplexity(model, tokens, context=context, max_tokens=max_tokens)
    ends = results[names[0]], results[names[1]]
    return BudgetReport(
        sensitivities,
        tuple(
            _choice(name, sites, sensitivities, layout, results[name], ends, seed)
            for name, sites in chosen.items()
        ),
    )


def _names(options: FlexqOptions) -> tuple[str, str]:
    return (
        f"W{options.w_bits}A{options.a_bits}",
        f"W{options.w_bits}A{options.high_bits}",
    )


def _choice(
    name: str,
    sites: tuple[str, ...],
    sensitivities: tuple[SiteSensitivity, ...],
    layout: ModelMap,
    result: PerplexityResult,
    ends: tuple[PerplexityResult, PerplexityResult],
    seed: int,
) -> Choice:
    worse, better = ends
    closed = None
    if len(result.nll) > 1:
        closed = gap_closed_interval(worse.nll, result.nll, better.nll, seed=seed)

    def share(weight: Callable[[SiteSensitivity], float]) -> float:
        total = sum(weight(sensitivity) for sensitivity in sensitivities)
        return (
            sum(weight(d) for d in sensitivities if d.site.name in sites) / total if total else 0.0
        )

    layers = layers_of(sensitivities, layout)
    return Choice(
        name,
        sites,
        layers=sum(any(d.site.name in sites for d in layer) for layer in layers) / len(layers),
        matrices=share(lambda sensitivity: 1),
        work=share(lambda sensitivity: sensitivity.site.n * sensitivity.site.k),
        predicted=share(lambda sensitivity: sensitivity.gain),
        result=result,
        closed=closed,
    )

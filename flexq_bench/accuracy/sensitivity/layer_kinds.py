"""Perplexity with one kind of layer quantized at a time (FlexQ, arXiv:2508.04405, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from flexq_bench.accuracy.perplexity import PerplexityResult, perplexity
from flexq_bench.schemes.errors import QuantizeError
from flexq_bench.schemes.linear_layers import replace_module
from flexq_bench.schemes.model_map import LinearSite, ModelMap, linear_at, map_model
from flexq_bench.schemes.own_schemes import OwnSchemeLoop
from flexq_bench.schemes.registry import resolve
from flexq_bench.schemes.uniform import FLEXQ_GROUP, round_site
from flexq_bench.stats import Interval, mean_difference_interval

ALL_KINDS = "all"
EXPERTS = "experts"  # all layers of all experts

OnStep = Callable[[int, int, str], None]
"""Called with the completed and all evaluations, and a description of the next one."""


@dataclass(frozen=True, slots=True)
class Bits:
    """Bits of weights and activations, rounded to nearest in groups along K (None: per row)."""

    w_bits: int
    a_bits: int
    group: int | None = FLEXQ_GROUP

    @property
    def name(self) -> str:
        return f"W{self.w_bits}A{self.a_bits}"

    def round(self, model: nn.Module, site: LinearSite) -> None:
        """Quantize one layer in place."""
        round_site(model, site, self.w_bits, self.a_bits, self.group)


@dataclass(frozen=True, slots=True)
class OwnSetting:
    """A user-defined scheme instead of bits; it must not need calibration."""

    scheme: str

    @property
    def name(self) -> str:
        return self.scheme

    def round(self, model: nn.Module, site: LinearSite) -> None:
        """Quantize one layer in place. Raises QuantizeError as the scheme does."""
        used = resolve(self.scheme)
        if not isinstance(used, OwnSchemeLoop) or used.needs_calibration:
            raise QuantizeError(
                f"{self.scheme}: --bits takes own schemes that need no calibration, and w6a6"
            )
        used.quantize_layer(model, site, None)


@dataclass(frozen=True, slots=True)
class KindSensitivity:
    """Perplexity of the model with one kind of layer quantized: the layers of one role.

    kind: the role; EXPERTS: all layers of experts; ALL_KINDS: every layer. increase: of the mean
    negative log likelihood over the dense model's, nats per token, with a 95 % interval over
    segments; None: a single segment.
    """

    kind: str
    bits: Bits | OwnSetting
    result: PerplexityResult
    increase: Interval | None

    @property
    def relative_ends(self) -> tuple[float, float] | None:
        """The interval as a fraction of the dense model's perplexity."""
        if self.increase is None:
            return None
        return math.expm1(self.increase.low), math.expm1(self.increase.high)


def kind_sensitivities(
    model: nn.Module,
    tokens: torch.Tensor,
    bits: Sequence[Bits | OwnSetting],
    *,
    context: int,
    max_tokens: int | None = None,
    seed: int = 0,
    on_step: OnStep | None = None,
) -> tuple[PerplexityResult, tuple[KindSensitivity, ...]]:
    """Compute the perplexity on tokens [T] of the dense model, and of each kind in each setting.

    bits: the settings. The model is dense again afterwards. Other arguments as of `perplexity`;
    seed: of the intervals. Raises QuantizeError if the model has no map, AccuracyError as
    `perplexity`.
    """
    layout = map_model(model)
    steps = [(setting, kind) for setting in bits for kind in _kinds(layout)]

    def evaluate(done: int, what: str) -> PerplexityResult:
        if on_step is not None:
            on_step(done, len(steps) + 1, what)
        return perplexity(model, tokens, context=context, max_tokens=max_tokens)

    dense = evaluate(0, "the model as it is")
    measured = []
    for done, (setting, kind) in enumerate(steps, start=1):
        sites = [site for site in layout.sites if kind in _kinds_of(site)]
        with restoring(model, sites):
            for site in sites:
                setting.round(model, site)
            result = evaluate(done, f"{setting.name}: {kind}")
        increase = None
        if len(result.nll) > 1:
            increase = mean_difference_interval(dense.nll, result.nll, seed=seed)
        measured.append(KindSensitivity(kind, setting, result, increase))
    return dense, tuple(measured)


@contextmanager
def restoring(model: nn.Module, sites: Sequence[LinearSite]) -> Iterator[None]:
    """Restore the dense layers of these sites at the end of the block.

    For schemes that only replace layers.
    """
    dense = {site.name: linear_at(model, site.name) for site in sites}
    try:
        yield
    finally:
        for name, layer in dense.items():
            replace_module(model, name, layer)


def _kinds(layout: ModelMap) -> tuple[str, ...]:
    mixture = any(site.of_expert for site in layout.sites)
    return (*layout.roles, *([EXPERTS] if mixture else []), ALL_KINDS)


def _kinds_of(site: LinearSite) -> tuple[str, ...]:
    return (site.role, ALL_KINDS, *([EXPERTS] if site.of_expert else []))

"""Results of an accuracy run: one of them by its names, and on some segments of its text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flexq_bench.accuracy.perplexity import perplexity_of
from flexq_bench.accuracy.results import PERPLEXITY, MetricResult


def shortened(result: MetricResult, count: int) -> MetricResult:
    """A perplexity, or KL divergence, on the first segments only."""
    return _on_segments(result, range(count))


def _on_segments(result: MetricResult, kept: Sequence[int]) -> MetricResult:
    """A mean over some of its segments; the result itself if none or all are kept."""
    if not 0 < len(kept) < len(result.values):
        return result
    values = tuple(result.values[index] for index in kept)
    mean = math.fsum(values) / len(values)
    value = perplexity_of(mean) if result.metric == PERPLEXITY else mean
    items = result.n_items // len(result.values) * len(values)
    return replace(result, values=values, value=value, n_items=items, standard_error=None)


def without_repeats(result: MetricResult, kept: Sequence[int], count: int) -> MetricResult:
    """A result on the distinct segments of a text, of `count` segments.

    A quantile stays that of all tokens, with an interval and a number of tokens as of the distinct
    ones.
    """
    share = len(kept) / count
    if share == 1 or result.value is None:
        return result
    if result.values:
        return _on_segments(result, [index for index in kept if index < len(result.values)])
    ends = {
        name: result.value + (float(result.observed[name]) - result.value) / math.sqrt(share)
        for name in ("low", "high")
        if name in result.observed
    }
    items = math.floor(result.n_items * share)
    return replace(result, n_items=items, observed={**result.observed, **ends})


def find(
    results: Sequence[MetricResult], scheme: str, task: str, metric: str
) -> MetricResult | None:
    key = (scheme, task, metric)
    return next((f for f in results if (f.scheme, f.task, f.metric) == key), None)

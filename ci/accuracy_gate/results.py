"""Results that the checks of the accuracy gate compare, on the same segments of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexq_bench.accuracy.perplexity import perplexity_of
from flexq_bench.accuracy.results import PERPLEXITY, MetricResult


@dataclass(frozen=True, slots=True)
class SchemeResults:
    """Results that the checks compare: those of a scheme and of its base.

    absent: texts and tasks that were not evaluated, with the reason.
    """

    scheme: str
    base: str
    results: Sequence[MetricResult]
    absent: Mapping[str, str]

    def find(self, scheme: str, task: str, metric: str) -> MetricResult | None:
        """The result of this metric, if there is one."""
        return find(self.results, scheme, task, metric)

    def pair(self, task: str, metric: str) -> tuple[MetricResult | None, MetricResult | None]:
        """The base's result and the scheme's, on their common segments."""
        first, second = self.find(self.base, task, metric), self.find(self.scheme, task, metric)
        if first is None or second is None or metric != PERPLEXITY:
            return first, second
        return shortened(first, len(second.values)), second

    def without_repeats(self, distinct: Mapping[str, tuple[Sequence[int], int]]) -> SchemeResults:
        """The same results on the distinct segments of each text.

        distinct: by text, the indices of these segments, and the number of all.
        """

        kept = [
            without_repeats(result, *distinct[result.task]) if result.task in distinct else result
            for result in self.results
        ]
        return replace(self, results=kept)

    def lacking(self, name: str) -> str:
        """Explain why a text or task has no results."""
        return self.absent.get(name, "no result arrived")

    def broken(self, first: MetricResult | None, second: MetricResult | None) -> str:
        """Explain a missing result that the scheme itself caused.

        first, second: results of the base and of the scheme. Empty: the scheme has the result, or
        lacks it for another reason.
        """
        base_has_value = first is not None and first.value is not None
        if second is not None and second.value is None and (first is second or base_has_value):
            return second.detail
        return ""


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

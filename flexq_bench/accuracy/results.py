"""Results of evaluating one task of one model under one scheme, and the difference of two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from flexq_bench.accuracy.errors import AccuracyError
from flexq_bench.accuracy.positions import MAX_CONTEXT, first_positions
from flexq_bench.stats import (
    Interval,
    block_quantile_intervals,
    is_clear,
    item_difference,
    mean_difference_interval,
)

if TYPE_CHECKING:  # torch and models, which readers of stored results don't need
    from flexq_bench.accuracy.agreement import Agreement
    from flexq_bench.accuracy.perplexity import PerplexityResult
    from flexq_bench.accuracy.tasks import TaskResult
    from flexq_bench.accuracy.texts import Text

FULL_PRECISION = "fp16"  # the scheme of the unquantized model
ORIGINAL = "reference"  # the scheme of a separate reference model
PERPLEXITY = "perplexity"
KL = "kl_divergence"
TOP1 = "top1_agreement"
TOP5 = "top5_agreement"
RANK_CHANGE = "rank_change"
LAYER_ERROR = "layer_error"
KL_QUANTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999, "max": 1.0}
# Increased when the same text gives another number. 2: BOS before each segment, if requested.
PERPLEXITY_VERSION = "2"

Direction = Literal["lower", "higher"]
Through = Literal["reference", "kernels"]
"""Implementations of quantized layers: dequantized weights in torch, or the registry's kernels."""

Bos = Literal["segment", "text", "none"]
"""Placements of the BOS token: see flexq_bench.accuracy.bos."""

REFERENCE: Through = "reference"
KERNELS: Through = "kernels"


def as_through(name: str | None) -> Through | None:
    """Parse the name of a Through; None stays None. Raises AccuracyError for an unknown name."""
    if name is not None and name not in get_args(Through):
        raise AccuracyError(f"--through {name}: give {' or '.join(get_args(Through))}")
    return name  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class MetricResult:
    """One metric of one task under one scheme.

    value: None: it failed, see `detail`. values: by segment (mean nats per token, for the
    perplexity) or question; empty: there are none. parameters: everything that affects the value,
    of quantization and evaluation; for a quantized model also `through`, `scheme_version` and, if
    known, `content_hash`. observed: other observations, such as tokens_per_s.
    """

    scheme: str
    task: str
    task_version: str
    data_hash: str
    metric: str
    direction: Direction
    value: float | None
    standard_error: float | None
    n_items: int
    values: tuple[float, ...]
    parameters: Mapping[str, Any]
    detail: str = ""
    observed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def through(self) -> Through:
        """Implementation of the quantized layers; reference for the unquantized model."""
        return KERNELS if self.parameters.get("through") == KERNELS else REFERENCE

    @property
    def content_hash(self) -> str | None:
        """Content hash of the evaluated checkpoint; None: the unquantized model, or unknown."""
        return self.parameters.get("content_hash")


@dataclass(frozen=True, slots=True)
class MetricDifference:
    """A scheme's metric minus the base's, on the same segments or questions.

    interval: 95 %; for a perplexity of its relative change (0.01: 1 % more), else in the metric's
    unit. clear: the interval excludes zero. p_value: McNemar's; None: the metric is not of
    questions.
    """

    base: float
    value: float
    interval: Interval
    clear: bool
    p_value: float | None


def difference(base: MetricResult, head: MetricResult, *, seed: int = 0) -> MetricDifference | None:
    """Compute the difference of two results of one metric; None: they can't be paired.

    Pairs need the same task, data and metric, and at least two values each.
    """
    same = (base.task, base.data_hash, base.metric) == (head.task, head.data_hash, head.metric)
    if base.value is None or head.value is None or not same:
        return None
    if len(base.values) != len(head.values) or len(base.values) < 2:
        return None
    if set(base.values) | set(head.values) <= {0.0, 1.0}:
        items = item_difference(base.values, head.values)
        clear = is_clear(items.interval)
        return MetricDifference(base.value, head.value, items.interval, clear, items.p_value)
    interval = mean_difference_interval(base.values, head.values, seed=seed)
    clear = is_clear(interval)
    if is_perplexity(head.metric):
        ends = (interval.estimate, interval.low, interval.high)
        interval = Interval(*(math.expm1(end) for end in ends))
    return MetricDifference(base.value, head.value, interval, clear, None)


def kl_metric(name: str) -> str:
    """Name the metric of a quantile of tokens' KL divergences, one of KL_QUANTILES: `kl_p99`."""
    return f"kl_{name}"


def position_metric(first: int) -> str:
    """Name the metric of the perplexity of a part of each segment: `perplexity_from_1024`."""
    return f"{PERPLEXITY}_from_{first}"


def is_perplexity(metric: str) -> bool:
    """Return True for the perplexity of segments or of a part of them."""
    return metric == PERPLEXITY or metric in AT_POSITIONS


AT_POSITIONS = tuple(map(position_metric, first_positions(MAX_CONTEXT)))
# Metrics of texts, not of questions.
OF_TEXTS = (
    PERPLEXITY,
    *AT_POSITIONS,
    KL,
    *map(kl_metric, KL_QUANTILES),
    TOP1,
    TOP5,
    RANK_CHANGE,
    LAYER_ERROR,
)


def perplexity_results(
    scheme: str,
    text: Text,
    result: PerplexityResult,
    agreement: Agreement | None,
    parameters: Mapping[str, Any],
) -> list[MetricResult]:
    """Return the perplexity and, with a reference, the agreement of the predictions.

    The quantiles of the tokens' KL divergences have a 95 % interval over segments in `observed`, as
    `low` and `high`; other metrics have a value for each segment.
    """
    common: dict[str, Any] = {
        "scheme": scheme,
        "task": text.name,
        "task_version": PERPLEXITY_VERSION,
        "data_hash": text.content_hash,
        "n_items": result.tokens,
        "parameters": {**parameters, "text": text.kind},
        "observed": {"tokens_per_s": result.tokens_per_s},
    }
    value = result.perplexity
    if not math.isfinite(value):
        what = f"the perplexity is {value}: the model's output is not finite, or far too large"
        return [_result(common, PERPLEXITY, "lower", None, None, (), what)]
    results = [
        _result(common, PERPLEXITY, "lower", value, result.standard_error, result.nll),
        *_at_positions(common, result),
    ]
    if agreement is None:
        return results
    results += [
        _result(common, KL, "lower", *_mean(agreement.kl)),
        _result(common, TOP1, "higher", *_mean(agreement.top1)),
        _result(common, TOP5, "higher", *_mean(agreement.top5)),
        _result(common, RANK_CHANGE, "lower", *_mean(agreement.rank_change)),
    ]
    if math.isfinite(agreement.mean_kl):
        quantiles = block_quantile_intervals(agreement.token_kl, tuple(KL_QUANTILES.values()))
        for name, interval in zip(KL_QUANTILES, quantiles, strict=True):
            seen = {**common["observed"], "low": interval.low, "high": interval.high}
            results.append(
                _result(
                    common | {"observed": seen},
                    kl_metric(name),
                    "lower",
                    interval.estimate,
                    None,
                    (),
                )
            )
    return results


def _at_positions(common: Mapping[str, Any], result: PerplexityResult) -> Iterator[MetricResult]:
    """Return the perplexity of each part of the segments, if there are several parts."""
    firsts = first_positions(result.context)
    if len(firsts) == 1 or not result.by_position:
        return
    ends = (*firsts[1:], result.context)
    for index, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        part = replace(
            result, nll=tuple(means[index] for means in result.by_position), by_position=()
        )
        tokens = {"n_items": len(part.nll) * (end - max(1, first))}
        yield _result(
            {**common, **tokens, "observed": {"positions": [first, end - 1]}},
            position_metric(first),
            "lower",
            part.perplexity if math.isfinite(part.perplexity) else None,
            part.standard_error,
            part.nll,
        )


def _mean(
    values: tuple[float, ...],
) -> tuple[float | None, float | None, tuple[float, ...], str]:
    """Return value, standard error, values and detail of a mean over segments."""
    if not all(map(math.isfinite, values)):
        return None, None, (), "a token that the reference expects has no probability left"
    return math.fsum(values) / len(values), _error(values), values, ""


def task_results(
    scheme: str, result: TaskResult, parameters: Mapping[str, Any]
) -> list[MetricResult]:
    """Return one result for each metric of a task of lm-eval."""
    return [
        MetricResult(
            scheme=scheme,
            task=result.task,
            task_version=result.version,
            data_hash=result.data_hash,
            metric=metric.metric,
            direction="higher" if metric.higher_is_better else "lower",
            value=metric.value if math.isfinite(metric.value) else None,
            standard_error=_error(metric.items),
            n_items=result.n_items,
            values=metric.items,
            parameters=parameters,
            detail="" if math.isfinite(metric.value) else f"the metric is {metric.value}",
            observed={"tasks": dict(metric.parts)} if metric.parts else {},
        )
        for metric in result.metrics
    ]


def layer_result(
    scheme: str, text: Text, errors: Mapping[str, float], parameters: Mapping[str, Any]
) -> MetricResult:
    """Return the relative squared output error of every layer; its value is the largest one."""
    worst = max(errors, key=lambda name: errors[name])
    finite = all(math.isfinite(error) for error in errors.values())
    return MetricResult(
        scheme=scheme,
        task=text.name,
        task_version=PERPLEXITY_VERSION,
        data_hash=text.content_hash,
        metric=LAYER_ERROR,
        direction="lower",
        value=errors[worst] if finite else None,
        standard_error=None,
        n_items=len(errors),
        values=tuple(errors.values()) if finite else (),
        parameters={**parameters, "layers": list(errors)},
        detail="" if finite else f"the output of {worst} is not finite",
        observed={"worst": worst},
    )


def _result(
    common: Mapping[str, Any],
    metric: str,
    direction: Direction,
    value: float | None,
    standard_error: float | None,
    values: tuple[float, ...],
    detail: str = "",
) -> MetricResult:
    return MetricResult(
        metric=metric,
        direction=direction,
        value=value,
        standard_error=standard_error,
        values=values,
        detail=detail,
        **common,
    )


def _error(values: tuple[float, ...]) -> float | None:
    """Standard error of the mean; None: fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return math.sqrt(variance / count)

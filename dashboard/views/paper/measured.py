"""What we measured of the same thing that a paper states, so that both can stand side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from db.queries import DecodeRow, ResultRow, ScoreRow
from db.reference_store import ReferenceInfo
from flexq_bench.stats import Interval, geometric_mean, ratio_interval
from flexq_bench.stats.baseline import time_of
from workloads.case import kernel_label
from workloads.errors import WorkloadError
from workloads.suites import load_suite

_FROM_THE_HUB = {"wikitext2": "wikitext"}  # another name of the same text
_AS_IN_PAPERS = "reference"
_NORMAL_95 = 1.959964  # standard errors from the middle to an end of a 95 % interval


@dataclass(frozen=True, slots=True)
class Ours:
    """A number of ours with its 95 % interval, on one kind of GPU.

    cases: how many it is over. apart: how many of them are of two separate runs.
    """

    gpu: str
    value: Interval
    cases: int
    apart: int


def ours_of(
    stated: ReferenceInfo,
    results: Sequence[ResultRow],
    scores: Sequence[ScoreRow],
    decodes: Sequence[DecodeRow],
) -> list[Ours]:
    """What was measured of the same thing, by GPU; empty: nothing was.

    results: the newest of each series; scores, decodes: the newest of their kind. A stated best
    case stands beside our best one, a mean beside a geometric mean.
    """
    compute: dict[str, Callable[[], list[Ours]]] = {
        "speedup": lambda: _speedups(stated, results),
        "decode-speedup": lambda: _decodes(stated, decodes, _token_time),
        "memory-ratio": lambda: _decodes(stated, decodes, _memory),
        "perplexity": lambda: _perplexities(stated, scores),
        "perplexity-increase": lambda: _increases(stated, scores),
    }
    return compute.get(stated.metric, list)()


def _speedups(stated: ReferenceInfo, results: Iterable[ResultRow]) -> list[Ours]:
    """baseline / kernel over the suite's layers, weights cold, stage gemm."""
    shapes = _shapes(stated)
    sides: dict[str, dict[tuple[str, int, int, int], ResultRow]] = {}
    for r in results:
        about = (r.stage, r.cache) == ("gemm", "cold") and (r.n, r.k) in shapes
        if about and stated.m in (None, r.m) and time_of(r) is not None:
            sides.setdefault(kernel_label(r.kernel, r.variant), {})[r.gpu, r.m, r.n, r.k] = r
    kernel, baseline = sides.get(stated.kernel, {}), sides.get(stated.baseline, {})
    pairs = [(baseline[key], kernel[key]) for key in sorted(kernel.keys() & baseline.keys())]
    ratios: dict[str, list[tuple[Interval, bool]]] = {}
    for over, ours in pairs:
        top, bottom = time_of(over), time_of(ours)
        if top is not None and bottom is not None:
            one = (ratio_interval(top, bottom), over.run != ours.run)
            ratios.setdefault(ours.gpu, []).append(one)
    return _means(stated, ratios)


def _shapes(stated: ReferenceInfo) -> set[tuple[int, int]]:
    try:
        shapes = load_suite(stated.suite).shapes
    except WorkloadError:  # of another version, which has other suites
        return set()
    return {(s.n, s.k) for s in shapes if stated.model in ("", s.model)}


def _decodes(
    stated: ReferenceInfo,
    decodes: Iterable[DecodeRow],
    value_of: Callable[[DecodeRow], Interval | None],
) -> list[Ours]:
    """baseline / scheme over every setting in which both were decoded."""
    sides: dict[str, dict[tuple[str, str, int, int, int, int], DecodeRow]] = {}
    for r in decodes:
        if stated.model in ("", r.model):
            place = (r.gpu, r.model, r.kv_bits, r.batch, r.prompt_tokens, r.new_tokens)
            sides.setdefault(r.scheme, {})[place] = r
    ours, over = sides.get(stated.kernel, {}), sides.get(stated.baseline, {})
    ratios: dict[str, list[tuple[Interval, bool]]] = {}
    for place in sorted(ours.keys() & over.keys()):
        top, bottom = value_of(over[place]), value_of(ours[place])
        if top is not None and bottom is not None:
            one = (ratio_interval(top, bottom), over[place].run != ours[place].run)
            ratios.setdefault(place[0], []).append(one)
    return _means(stated, ratios)


def _token_time(row: DecodeRow) -> Interval | None:
    if not row.token_ms:
        return None
    low, high = row.token_ci_low_ms, row.token_ci_high_ms
    return Interval(row.token_ms, low or row.token_ms, high or row.token_ms)


def _memory(row: DecodeRow) -> Interval | None:
    size = row.peak_memory_bytes
    return Interval(size, size, size) if size else None


def _means(stated: ReferenceInfo, ratios: dict[str, list[tuple[Interval, bool]]]) -> list[Ours]:
    means = []
    for gpu, of_gpu in ratios.items():
        values = [ratio for ratio, _ in of_gpu]
        best = max(values, key=lambda one: one.estimate)
        value = best if stated.bound == "up to" else geometric_mean(values)
        means.append(Ours(gpu, value, len(values), sum(apart for _, apart in of_gpu)))
    return means


def _perplexities(stated: ReferenceInfo, scores: Iterable[ScoreRow]) -> list[Ours]:
    return [
        Ours(row.gpu, _interval(row.value, row.standard_error), 1, 0)
        for row in _about(stated, scores, stated.kernel)
        if row.model == stated.model
    ]


def _increases(stated: ReferenceInfo, scores: Sequence[ScoreRow]) -> list[Ours]:
    """The largest increase over models, as the two scores were taken independently."""
    before = {(r.gpu, r.model): r for r in _about(stated, scores, stated.baseline)}
    by_gpu: dict[str, list[tuple[Interval, bool]]] = {}
    for row in _about(stated, scores, stated.kernel):
        base = before.get((row.gpu, row.model))
        if base is None or stated.model not in ("", row.model):
            continue
        errors = (row.standard_error, base.standard_error)
        error = None if None in errors else math.hypot(*(e or 0.0 for e in errors))
        one = (_interval(row.value - base.value, error), row.run != base.run)
        by_gpu.setdefault(row.gpu, []).append(one)
    return [
        Ours(
            gpu,
            max((value for value, _ in of_gpu), key=lambda one: one.estimate),
            len(of_gpu),
            sum(apart for _, apart in of_gpu),
        )
        for gpu, of_gpu in by_gpu.items()
    ]


def _about(stated: ReferenceInfo, scores: Iterable[ScoreRow], scheme: str) -> list[ScoreRow]:
    """A score a GPU, model and task: the reference's, as the papers have it, else the kernels'."""
    about = [
        row
        for row in scores
        if (row.scheme, row.metric) == (scheme, "perplexity")
        and stated.task in (row.task, _FROM_THE_HUB.get(row.task))
    ]
    last = sorted(about, key=lambda row: row.through == _AS_IN_PAPERS)
    return list({(row.gpu, row.model, row.task): row for row in last}.values())


def _interval(value: float, standard_error: float | None) -> Interval:
    half = _NORMAL_95 * (standard_error or 0.0)
    return Interval(value, value - half, value + half)

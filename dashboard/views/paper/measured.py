"""Measurements of the quantities that papers publish, for comparison."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexq_bench.db.queries import DecodeRow, ResultRow, ScoreRow
from flexq_bench.db.reference_store import ReferenceInfo
from flexq_bench.results.stored_comparison import bases_of, level_ratio, newest_of_cases
from flexq_bench.results.stored_noise import StoredNoise
from flexq_bench.stats import Interval, geometric_mean, ratio_interval
from flexq_bench.stats.baseline import time_of
from flexq_bench.stats.run_noise import with_run_noise
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.suites import load_suite

_HUB_NAMES = {"wikitext2": "wikitext"}  # task -> name of the same text on the hub
_PREFERRED_THROUGH = "reference"  # as in the papers
# Kernel of a paper -> kernels that replace it here: the same formats, another design.
SUCCESSORS = {"flexq-w6a6": ("flexq",)}
# Baselines below the first value are too slow to be comparable with the paper's: no ratio is
# shown. Below the second one the ratio has a caveat.
_MIN_PERCENT_OF_FLOOR, _LOW_PERCENT_OF_FLOOR = 25.0, 50.0
_NORMAL_95 = 1.959964  # half-width of a 95 % interval in standard errors


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    """A measured number with its 95 % interval, on one GPU model.

    value None: not comparable with the published one, see caveats. cases: number of cases from
    which it is computed. apart: number of these whose two results are of separate runs. kernel: the
    measured one, which may be a successor. of: number of cases of the published number; 0: unknown.
    """

    gpu: str
    value: Interval | None
    cases: int
    apart: int
    kernel: str = ""
    of: int = 0
    caveats: tuple[str, ...] = ()


def measured_values(
    published: ReferenceInfo,
    results: Sequence[ResultRow],
    scores: Sequence[ScoreRow],
    decodes: Sequence[DecodeRow],
    *,
    baselines: Sequence[ResultRow] = (),
    noise: StoredNoise | None = None,
) -> list[MeasuredValue]:
    """Return our measurements of a published quantity, by GPU; empty: there are none.

    results: the newest of each series. baselines: results of baselines of the same runs, preferred
    for ratios. noise: run-to-run noise, for ratios of separate runs. scores, decodes: the newest of
    each kind. A published best case is compared with the best case, a mean with the geometric mean.
    """
    compute: dict[str, Callable[[], list[MeasuredValue]]] = {
        "speedup": lambda: _speedups(published, results, baselines, noise or StoredNoise({})),
        "decode-speedup": lambda: _decodes(published, decodes, _token_time),
        "memory-ratio": lambda: _decodes(published, decodes, _memory),
        "perplexity": lambda: _perplexities(published, scores),
        "perplexity-increase": lambda: _increases(published, scores),
    }
    return compute.get(published.metric, list)()


def _speedups(
    published: ReferenceInfo,
    results: Iterable[ResultRow],
    baselines: Sequence[ResultRow],
    noise: StoredNoise,
) -> list[MeasuredValue]:
    """Compute baseline / kernel over the suite's layers (cold, stage gemm), by kernel and GPU.

    For the kernel that the paper names, and its successors.
    """
    shapes = _shapes(published)
    relevant = [
        r
        for r in newest_of_cases(results)
        if (r.stage, r.cache) == ("gemm", "cold")
        and (r.n, r.k) in shapes
        and published.m in (None, r.m)
        and time_of(r) is not None
    ]
    base_of = bases_of(relevant, baselines, published.baseline)
    speedups = []
    for kernel in (published.kernel, *SUCCESSORS.get(published.kernel, ())):
        by_gpu: dict[str, list[tuple[ResultRow, ResultRow]]] = {}
        for r in relevant:
            base = base_of(r)
            if kernel_label(r.kernel, r.variant) == kernel and base is not None:
                by_gpu.setdefault(r.gpu, []).append((base, r))
        expected = len(shapes) if published.m is not None else 0
        speedups += [
            _speedup(published, kernel, expected, pairs, noise)
            for _, pairs in sorted(by_gpu.items())
        ]
    return speedups


def _speedup(
    published: ReferenceInfo,
    kernel: str,
    expected: int,
    pairs: Sequence[tuple[ResultRow, ResultRow]],
    noise: StoredNoise,
) -> MeasuredValue:
    gpu, apart = pairs[0][1].gpu, [base.run != measured.run for base, measured in pairs]
    shares = [base.pct_of_floor for base, _ in pairs if base.pct_of_floor]
    share = statistics.median(shares) if shares else None
    caveats = []
    if expected and len(pairs) < expected:
        caveats.append(f"{len(pairs)} of {expected} layers")
    if any(apart):
        caveats.append(f"{sum(apart)} of separate runs")
    if kernel != published.kernel:
        caveats.append(f"{kernel} is the successor of {published.kernel}")
    if share is not None and share < _MIN_PERCENT_OF_FLOOR:
        reason = f"not comparable: {published.baseline} reaches {share:.0f} % of its floor here"
        return MeasuredValue(
            gpu, None, len(pairs), sum(apart), kernel, expected, (reason, *caveats)
        )
    if share is not None and share < _LOW_PERCENT_OF_FLOOR:
        caveats.append(f"{published.baseline} is at {share:.0f} % of its floor")
    ratios = [level_ratio(base, measured, noise) for base, measured in pairs]
    value = max(ratios, key=lambda ratio: ratio.estimate)
    if published.bound != "up to":
        value = geometric_mean(ratios)
        if any(apart):
            times = [(time_of(base), time_of(measured)) for base, measured in pairs]
            value = geometric_mean([ratio_interval(b, o) for b, o in times if b and o])
            for side in (0, 1):
                value = with_run_noise(value, noise.of_mean([p[side].series_id for p in pairs]))
    return MeasuredValue(gpu, value, len(pairs), sum(apart), kernel, expected, tuple(caveats))


def _shapes(published: ReferenceInfo) -> set[tuple[int, int]]:
    try:
        shapes = load_suite(published.suite).shapes
    except WorkloadError:  # stored by another version, with other suites
        return set()
    return {(s.n, s.k) for s in shapes if published.model in ("", s.model)}


def _decodes(
    published: ReferenceInfo,
    decodes: Iterable[DecodeRow],
    value_of: Callable[[DecodeRow], Interval | None],
) -> list[MeasuredValue]:
    """Compute baseline / scheme over all settings in which both were decoded."""
    sides: dict[str, dict[tuple[str, str, int, int, int, int], DecodeRow]] = {}
    for r in decodes:
        if published.model in ("", r.model):
            setting = (r.gpu, r.model, r.kv_bits, r.batch, r.prompt_tokens, r.new_tokens)
            sides.setdefault(r.scheme, {})[setting] = r
    schemes, bases = sides.get(published.kernel, {}), sides.get(published.baseline, {})
    ratios: dict[str, list[tuple[Interval, bool]]] = {}
    for setting in sorted(schemes.keys() & bases.keys()):
        base, scheme = bases[setting], schemes[setting]
        numerator, denominator = value_of(base), value_of(scheme)
        if numerator is not None and denominator is not None:
            ratio = ratio_interval(numerator, denominator)
            ratios.setdefault(setting[0], []).append((ratio, base.run != scheme.run))
    return _means(published, ratios)


def _token_time(row: DecodeRow) -> Interval | None:
    if not row.token_ms:
        return None
    low, high = row.token_ci_low_ms, row.token_ci_high_ms
    return Interval(row.token_ms, low or row.token_ms, high or row.token_ms)


def _memory(row: DecodeRow) -> Interval | None:
    size = row.peak_memory_bytes
    return Interval(size, size, size) if size else None


def _means(
    published: ReferenceInfo, ratios: dict[str, list[tuple[Interval, bool]]]
) -> list[MeasuredValue]:
    means = []
    for gpu, on_gpu in ratios.items():
        values = [ratio for ratio, _ in on_gpu]
        best = max(values, key=lambda ratio: ratio.estimate)
        value = best if published.bound == "up to" else geometric_mean(values)
        means.append(MeasuredValue(gpu, value, len(values), sum(apart for _, apart in on_gpu)))
    return means


def _perplexities(published: ReferenceInfo, scores: Iterable[ScoreRow]) -> list[MeasuredValue]:
    return [
        MeasuredValue(row.gpu, _interval(row.value, row.standard_error), 1, 0)
        for row in _scores_of(published, scores, published.kernel)
        if row.model == published.model
    ]


def _increases(published: ReferenceInfo, scores: Sequence[ScoreRow]) -> list[MeasuredValue]:
    """Compute the largest increase over models, as if the two scores were independent."""
    before = {(r.gpu, r.model): r for r in _scores_of(published, scores, published.baseline)}
    by_gpu: dict[str, list[tuple[Interval, bool]]] = {}
    for row in _scores_of(published, scores, published.kernel):
        base = before.get((row.gpu, row.model))
        if base is None or published.model not in ("", row.model):
            continue
        errors = (row.standard_error, base.standard_error)
        error = None if None in errors else math.hypot(*(e or 0.0 for e in errors))
        increase = _interval(row.value - base.value, error)
        by_gpu.setdefault(row.gpu, []).append((increase, row.run != base.run))
    return [
        MeasuredValue(
            gpu,
            max((value for value, _ in on_gpu), key=lambda value: value.estimate),
            len(on_gpu),
            sum(apart for _, apart in on_gpu),
        )
        for gpu, on_gpu in by_gpu.items()
    ]


def _scores_of(published: ReferenceInfo, scores: Iterable[ScoreRow], scheme: str) -> list[ScoreRow]:
    """Return one score per GPU, model and task, preferably through the reference."""
    relevant = [
        row
        for row in scores
        if (row.scheme, row.metric) == (scheme, "perplexity")
        and published.task in (row.task, _HUB_NAMES.get(row.task))
    ]
    last = sorted(relevant, key=lambda row: row.through == _PREFERRED_THROUGH)
    return list({(row.gpu, row.model, row.task): row for row in last}.values())


def _interval(value: float, standard_error: float | None) -> Interval:
    half = _NORMAL_95 * (standard_error or 0.0)
    return Interval(value, value - half, value + half)

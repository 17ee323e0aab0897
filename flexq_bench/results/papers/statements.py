"""Ours beside the numbers that the papers' texts state, and a verdict on each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flexq_bench.db.queries import DecodeRow, ResultRow
from flexq_bench.results.papers.evidence import Evidence, kv_bits_of
from flexq_bench.results.papers.tables import (
    SCORES,
    WITHIN,
    WITHIN_SCORE,
    VerdictKind,
    generation_value,
)
from flexq_bench.workloads.case import Case, kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.published import Figure, Paper, PublishedTable, Statement, Subject
from flexq_bench.workloads.suites import load_suite

_DOWN = ("down_proj", "fc2")
_LIMITS = ("at most", "less than")
_OVER = "more than"
_RATIOS = ("speedup", "e2e-speedup", "memory-ratio", "throughput-ratio")
_SIZES = ("memory", "perplexity", "token-latency")  # have no sign
_PERCENT = 100.0
_LAYERS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj", "fc1", "fc2", "lm_head")


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured value for a statement.

    value: of the best case if the paper states one, of the worst if it states a bound, else the
    arithmetic mean;
    geometric: the geometric one, None: there is no mean. cases: number of values. where: a GPU, or
    a model that stands in for the paper's. ends: of the values.
    """

    value: float
    geometric: float | None
    cases: int
    where: str
    ends: tuple[float, float]

    @property
    def text(self) -> str:
        """The value and, of several cases, their range and geometric mean."""
        if self.cases == 1:
            return f"{self.value:.4g} (1 case)"
        means = "" if self.geometric is None else f", geometric {self.geometric:.4g}"
        ends = f"{self.ends[0]:.4g} to {self.ends[1]:.4g}"
        return f"{self.value:.4g} ({self.cases} cases, {ends}{means})"


@dataclass(frozen=True, slots=True)
class StatementResult:
    """A statement with ours. measured None: nothing is."""

    paper: Paper
    statement: Statement
    measured: Measured | None
    kind: VerdictKind
    verdict: str


def is_of(statement: Statement, entry: PublishedTable | Figure) -> bool:
    """Return True if it is about a table or figure, or is measured by the suite of a figure."""
    suite = "" if statement.ours is None else statement.ours.suite
    is_of_suite = isinstance(entry, Figure) and bool(suite) and suite == entry.suite
    return statement.is_about(entry.id) or is_of_suite


def statement_result(paper: Paper, statement: Statement, evidence: Evidence) -> StatementResult:
    """Set ours beside a statement and judge it by size, by limit, or by sign.

    Of several GPUs it is the one with most cases.
    """
    measured = _measured(paper, statement, evidence)
    if measured is None:
        about = statement.cannot if statement.ours is None else _what_lacks(statement)
        return StatementResult(
            paper, statement, None, "not here", f"can't be judged here since {about}"
        )
    metric = statement.metric.partition("-")[0]
    if metric in SCORES and measured.where not in _models(paper, statement):
        kind, verdict = _by_sign(statement, measured)
    else:
        kind, verdict = _verdict(statement, measured)
    return StatementResult(paper, statement, measured, kind, verdict)


def _models(paper: Paper, statement: Statement) -> list[str]:
    """Return the models that a statement is of: all of the paper where it names none."""
    if statement.model:
        return [paper.model(statement.model)]
    cells = (cell for table in paper.table for cell in table.cells())
    return sorted({paper.model(str(cell.at["model"])) for cell in cells if "model" in cell.at})


def _what_lacks(statement: Statement) -> str:
    ours = statement.ours
    assert ours is not None
    pair = f"{ours.kernel} and {ours.baseline}" if ours.baseline else ours.kernel
    return f"{pair} have no results for {statement.metric}"


def _measured(paper: Paper, statement: Statement, evidence: Evidence) -> Measured | None:
    ours = statement.ours
    if ours is None:
        return None
    metric = statement.metric
    if ours.suite:
        return _of_kernels(statement, ours, evidence)
    if metric in ("e2e-speedup", "memory-ratio", "memory", "time-share"):
        return _of_decodes(paper, statement, ours, evidence)
    if metric == "throughput-ratio":
        return _of_servings(statement, ours, evidence)
    if metric == "token-latency":
        return _token_latency(statement, ours, evidence)
    if metric.startswith(("perplexity", "accuracy")):
        return _of_scores(paper, statement, ours, evidence)
    return None


def _of_kernels(statement: Statement, ours: Subject, evidence: Evidence) -> Measured | None:
    pairs = _operation_pairs if ours.kernel.startswith("decoder-attention") else _gemm_pairs
    by_gpu = [
        (gpu, [_ratio(statement, *pair) for pair in pairs(statement, ours, evidence, gpu)])
        for gpu in sorted({r.gpu for r in evidence.results})
    ]
    return _best(statement, by_gpu)


def _ratio(statement: Statement, found: ResultRow, base: ResultRow) -> float:
    assert found.median_us
    assert base.median_us
    if statement.metric == "overhead":
        return (found.median_us / base.median_us - 1) * _PERCENT
    return base.median_us / found.median_us


def _gemm_pairs(
    statement: Statement, ours: Subject, evidence: Evidence, gpu: str
) -> list[tuple[ResultRow, ResultRow]]:
    return [
        pair
        for labels, shapes in _compared(statement, ours).items()
        for pair in evidence.of_shapes(gpu, labels, shapes, statement.m)
    ]


def _compared(statement: Statement, ours: Subject) -> dict[tuple[str, str], set[tuple[int, int]]]:
    """Return the shapes N, K at which a statement compares two kernels, by their labels."""
    found: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for shape in load_suite(ours.suite).shapes:
        is_named = statement.model in ("", shape.model) or not shape.model
        is_stated = (statement.n, statement.k) in ((None, None), (shape.n, shape.k))
        if is_named and is_stated and ours.layer in ("", shape.layer):
            is_down = bool(ours.on_down) and shape.layer in _DOWN
            labels = ours.on_down[:2] if is_down else (ours.kernel, ours.baseline)
            found.setdefault((labels[0], labels[1]), set()).add((shape.n, shape.k))
    return found


def compared_cases(statement: Statement, cases: Iterable[Case]) -> set[Case]:
    """Return those of a suite's cold cases of which a statement compares the times in pairs."""
    ours = statement.ours
    assert ours is not None
    places: dict[tuple[tuple[str, str], str], list[Case]] = {}
    of_shapes = _compared(statement, ours)
    for case in cases:
        if case.cache != "cold" or case.regime != "boost" or case.stage == "linear":
            continue
        if isinstance(case.workload, GemmWorkload):
            labels = [
                pair
                for pair, shapes in of_shapes.items()
                if case.label in pair and case.shape in shapes
            ]
            is_stated = statement.m in (None, case.workload.m)
        else:
            labels = (
                [(ours.kernel, ours.baseline)] if case.label in (ours.kernel, ours.baseline) else []
            )
            given = {(name, str(value)) for name, value in case.workload.values}
            is_stated = _parameters(statement) <= given
        for pair in labels if is_stated else ():
            places.setdefault((pair, case.workload.key), []).append(case)
    return {case for pair in places.values() if len(pair) > 1 for case in pair}


def _parameters(statement: Statement) -> set[tuple[str, str]]:
    """Return the parameters of attention that a statement is of."""
    return {
        ("batch", str(statement.batch)),
        ("context", str(statement.setting.get("sequence_length"))),
    }


def _operation_pairs(
    statement: Statement, ours: Subject, evidence: Evidence, gpu: str
) -> list[tuple[ResultRow, ResultRow]]:
    wanted = _parameters(statement)
    found: dict[str, dict[str, ResultRow]] = {}
    for r in evidence.results:
        given = {tuple(part.split("=")) for part in r.parameters.split(",")}
        if r.gpu == gpu and r.operation == "decoder_attention" and wanted <= given:
            found.setdefault(r.parameters, {})[kernel_label(r.kernel, r.variant)] = r
    return [
        (of[ours.kernel], of[ours.baseline])
        for of in found.values()
        if {ours.kernel, ours.baseline} <= of.keys()
    ]


def _of_decodes(
    paper: Paper, statement: Statement, ours: Subject, evidence: Evidence
) -> Measured | None:
    model = paper.model(ours.model or statement.model)
    rows: dict[tuple[str, str, int, int, int], dict[str, DecodeRow]] = {}
    for r in sorted(evidence.decodes, key=lambda r: r.created_at):
        if model in ("", r.model) and r.token_ms is not None and r.kv_bits == kv_bits_of(r.scheme):
            setting = (r.gpu, r.model, r.batch, r.prompt_tokens, r.new_tokens)
            if statement.batch in (None, r.batch):
                rows.setdefault(setting, {})[r.scheme] = r
    values: dict[str, list[float]] = {}
    for setting, of in sorted(rows.items()):
        found, base = of.get(ours.kernel), of.get(ours.baseline)
        if found is None or (ours.baseline and base is None):
            continue
        value = _decode_value(statement, ours, found, base)
        if value is not None and math.isfinite(value):
            values.setdefault(setting[0], []).append(value)
    return _best(statement, list(values.items()))


def _decode_value(
    statement: Statement, ours: Subject, found: DecodeRow, base: DecodeRow | None
) -> float | None:
    if statement.metric == "memory":
        return generation_value(found, "memory")
    if statement.metric == "time-share":
        return _share_of_layers(found)
    assert base is not None
    if statement.metric == "memory-ratio":
        own, theirs = generation_value(found, "memory"), generation_value(base, "memory")
        if own is None or theirs is None:
            return None
        return own / theirs if statement.better == "lower" else theirs / own
    if ours.phase == "prefill":
        is_long = found.prompt_tokens >= 512  # the paper's shortest sequence
        times = found.prefill_ms, base.prefill_ms
        return times[1] / times[0] if is_long and times[0] and times[1] else None
    return base.token_ms / found.token_ms if base.token_ms and found.token_ms else None


def _share_of_layers(row: DecodeRow) -> float | None:
    """Return the percentage of a decode step in dense layers and attention; None: no profile."""
    whole = sum(part["us"] for part in row.parts)
    other = sum(part["us"] for part in row.parts if part["part"] not in _LAYERS)
    return _PERCENT * (1 - other / whole) if whole else None


def _of_servings(statement: Statement, ours: Subject, evidence: Evidence) -> Measured | None:
    """Ratios of tokens/s at the same limit of memory, or of the batch where none has one."""
    rows: dict[tuple[str, str, int | None, int], dict[str, float]] = {}
    for r in evidence.servings:
        if r.tokens_per_s and r.kv_bits == kv_bits_of(r.scheme):
            rows.setdefault((r.gpu, r.model, r.memory_limit_bytes, r.batch_limit), {})[r.scheme] = (
                r.tokens_per_s
            )
    by_gpu: dict[tuple[bool, str], list[float]] = {}
    for (gpu, _, limit, _), of in sorted(rows.items(), key=str):
        if ours.kernel in of and ours.baseline in of:
            by_gpu.setdefault((limit is not None, gpu), []).append(
                of[ours.kernel] / of[ours.baseline]
            )
    limited = any(is_limited for is_limited, _ in by_gpu)
    at = "in the same memory" if limited else "at the same batch"
    return _best(
        statement, [(f"{gpu}, {at}", v) for (is_lim, gpu), v in by_gpu.items() if is_lim == limited]
    )


def _token_latency(statement: Statement, ours: Subject, evidence: Evidence) -> Measured | None:
    """Median times of a token at the stated number of requests at once, without a limit of memory
    where such a serving is stored.
    """
    rows = [
        r
        for r in evidence.servings
        if (r.scheme, r.batch_limit) == (ours.kernel, statement.batch)
        and r.token_p50_ms is not None
        and r.kv_bits == kv_bits_of(r.scheme)
    ]
    free = [r for r in rows if r.memory_limit_bytes is None] or rows
    return _best(statement, [(r.gpu, [r.token_p50_ms]) for r in free if r.token_p50_ms])


def _of_scores(
    paper: Paper, statement: Statement, ours: Subject, evidence: Evidence
) -> Measured | None:
    metric, _, change = statement.metric.partition("-")
    task = statement.task or ("mean" if metric == "accuracy" else "wikitext2")
    others = sorted(evidence.models, key=lambda model: (-evidence.models[model], model))
    if not change:
        others = []  # a value of the named model says nothing about others
    models = _models(paper, statement)
    for model in dict.fromkeys((*models, *others)):
        found = evidence.score(model, ours.kernel, task, metric)
        base = evidence.score(model, ours.baseline, task, metric) if change else 0.0
        if found is not None and base is not None:
            value = base - found if change == "decrease" else found - base
            return Measured(value, None, 1, model, (value, value))
    return None


def _best(statement: Statement, by_gpu: Sequence[tuple[str, Sequence[float]]]) -> Measured | None:
    if not any(values for _, values in by_gpu):
        return None
    gpu, values = max(by_gpu, key=lambda pair: len(pair[1]))
    best: Callable[[Sequence[float]], float] = min if statement.better == "lower" else max
    is_ratio = statement.metric in _RATIOS
    geometric = math.exp(sum(map(math.log, values)) / len(values)) if is_ratio else None
    ends = {_OVER: min(values), **dict.fromkeys(_LIMITS, max(values)), "up to": best(values)}
    value = ends.get(statement.bound, sum(values) / len(values))
    mean = geometric if len(values) > 1 else None
    return Measured(value, mean, len(values), gpu, (min(values), max(values)))


def _verdict(statement: Statement, measured: Measured) -> tuple[VerdictKind, str]:
    low, high = statement.range
    value, where = measured.value, f" on {measured.where}"
    if statement.metric in _RATIOS:
        factor = max(value / high, low / value, 1.0)
        if factor <= WITHIN:
            return "reproduced", f"reproduced within {factor:.2f}x{where}"
        if (value > 1) == (low > 1):
            return "order holds", f"order holds, by another factor{where}"
        return "differs", f"differs: the order is reversed{where}"
    bounds = dict.fromkeys(_LIMITS, value <= high) | {_OVER: value >= low}
    if bounds.get(statement.bound):
        return "reproduced", f"reproduced: the bound holds{where}"
    if statement.bound in bounds and statement.metric.partition("-")[0] not in SCORES:
        return "differs", f"differs: the bound does not hold{where}"
    if statement.metric in _SIZES:
        factor = max(value / high, low / value, 1.0)
        within = WITHIN_SCORE if statement.metric == "perplexity" else WITHIN
        if statement.bound not in bounds and factor <= within:
            return "reproduced", f"reproduced within {factor:.2f}x{where}"
        return "differs", f"differs by {factor:.2f}x{where}"
    return _by_sign(statement, measured)


def _by_sign(statement: Statement, measured: Measured) -> tuple[VerdictKind, str]:
    if (measured.value > 0) == (statement.range[1] > 0):
        return "order holds", f"sign holds, by another amount on {measured.where}"
    return "differs", f"differs: the sign is reversed on {measured.where}"

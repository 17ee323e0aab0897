"""Ours beside every number of a published table, and the table's verdict."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

from flexq_bench.db.queries import DecodeRow
from flexq_bench.measure.protocol import BRIEF_VERSIONS
from flexq_bench.results.papers.evidence import BANDWIDTHS, Evidence
from flexq_bench.workloads.models import get_model
from flexq_bench.workloads.published import Cell, Paper, PublishedTable

VerdictKind = Literal["reproduced", "order holds", "differs", "not here"]
# Ratios within a table are reproduced within this factor, perplexities and accuracies of the named
# model within the second one.
WITHIN, WITHIN_SCORE = 1.25, 1.02
MOST = 0.9  # share of the printed orders that must hold
_CLEAR = 0.03  # printed numbers closer than this have no order
_BYTE = 8
_MANY_SUBJECTS = 6
_PERCENT = 100.0
_US = {"us": 1.0, "ms": 1e3}
SCORES = ("perplexity", "accuracy")
_CHANGE = "-change"  # of a metric: of the row above
_DECREASE = "-decrease"  # of a metric: below the unquantized model


@dataclass(frozen=True, slots=True)
class Ours:
    """A measured value for a cell. value None: nothing is measured, for a reason.

    name: our kernel or scheme. model: another model than the cell's, which stands in for it.
    share, their_share: of the GPU's memory bandwidth at which the weights are read; None: unknown.
    brief: it is a brief time, right to a few percent. accepted: it may enter a history. error: the
    standard error of an accuracy.
    """

    value: float | None
    reason: str = ""
    name: str = ""
    model: str = ""
    share: float | None = None
    their_share: float | None = None
    brief: bool = False
    accepted: bool = True
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class TableResult:
    """A table with ours. held of pairs: printed orders that hold here. factor: of the ratio to the
    group's first number, the largest between theirs and ours.
    """

    paper: Paper
    table: PublishedTable
    gpu: str
    cells: tuple[tuple[Cell, Ours], ...]
    kind: VerdictKind
    verdict: str
    held: int = 0
    pairs: int = 0
    factor: float | None = None

    @property
    def name(self) -> str:
        return f"{self.paper.key}/{self.table.id}"

    @property
    def measured(self) -> int:
        return _measured(self.cells)

    @property
    def printed(self) -> int:
        return sum(cell.value is not None for cell, _ in self.cells)


def table_result(
    paper: Paper, table: PublishedTable, evidence: Evidence, gpu: str | None = None
) -> TableResult:
    """Set ours beside a table's numbers and judge it.

    gpu: only its times; None: of each model those of the GPU with most of them. Accuracy tables of
    models without a result are compared in their order with the model here that was evaluated under
    most schemes.
    """
    cells = list(table.cells())
    if is_of_scores(table):
        stand_in = _stand_in(paper, cells, evidence)
        rows = _with_changes([(cell, _score(paper, cell, evidence, stand_in)) for cell in cells])
        gpu = ""
    else:
        candidates = [gpu] if gpu else evidence.gpus
        chosen = []
        for model in dict.fromkeys(cell.at.get("model") for cell in cells):
            of_model = [cell for cell in cells if cell.at.get("model") == model]
            timed = [(g, _timed(paper, table, of_model, evidence, g)) for g in (candidates or [""])]
            chosen.append(max(timed, key=lambda pair: _measured(pair[1])))
        known = [pair for pair in chosen if _measured(pair[1])] or chosen
        gpu = ", ".join(sorted({name for name, _ in known}))
        together = (pair for _, of_gpu in chosen for pair in of_gpu)
        rows = tuple(sorted(together, key=lambda pair: (pair[0].row, pair[0].column)))
    return _judged(paper, table, gpu, rows)


def _measured(rows: Sequence[tuple[Cell, Ours]]) -> int:
    return sum(None not in (cell.value, ours.value) for cell, ours in rows)


def is_of_scores(table: PublishedTable) -> bool:
    """Return True if all of a table's numbers are perplexities and accuracies."""
    return all(cell.metric.partition("-")[0] in SCORES for cell in table.cells())


def _stand_in(paper: Paper, cells: Sequence[Cell], evidence: Evidence) -> str:
    """Return the model that was evaluated under most of the table's schemes, then under most.

    Empty: none was, or one that the table names was.
    """
    schemes = {scheme for cell in cells for scheme in paper.schemes_of(cell)}
    tasks = {str(cell.at.get("task", "")) for cell in cells}
    metrics = {cell.metric for cell in cells}
    found = Counter(
        model
        for model in evidence.models
        for scheme in schemes
        for task in tasks
        for metric in metrics
        if evidence.score(model, scheme, task, metric) is not None
    )
    named = {paper.model(str(cell.at.get("model", ""))) for cell in cells}
    if named & found.keys():
        return ""
    return max(found, key=lambda model: (found[model], evidence.models[model], model), default="")


def _score(paper: Paper, cell: Cell, evidence: Evidence, stand_in: str) -> Ours:
    if why := paper.why_absent(cell):
        return Ours(None, why)
    schemes, task = paper.schemes_of(cell), str(cell.at.get("task", ""))
    named = paper.model(str(cell.at.get("model", "")))
    metric = cell.metric.removesuffix(_DECREASE)
    for model, scheme in product(dict.fromkeys((named, stand_in)), schemes):
        found = evidence.scored(model, scheme, task, metric) if model else None
        value, error = found or (None, 0.0)
        if value is not None and cell.metric.endswith(_DECREASE):
            base = evidence.score(model, "fp16", task, metric)
            value = None if base is None else base - value
        if value is not None:
            error *= metric == "accuracy"  # texts are the same, so perplexities differ less
            return Ours(value, "", scheme, "" if model == named else model, error=error)
    where = f"{named} or {stand_in}" if stand_in else named
    return Ours(None, f"{schemes[0]} of {where} has no result on {task}", schemes[0])


def _with_changes(rows: Sequence[tuple[Cell, Ours]]) -> tuple[tuple[Cell, Ours], ...]:
    """Fill in the columns of changes to the row above, where they have the printed direction."""
    scores = {cell.row: ours for cell, ours in rows if cell.metric in SCORES}
    filled = []
    for cell, ours in rows:
        now, above = scores.get(cell.row), scores.get(cell.row - 1)
        if cell.metric.endswith(_CHANGE) and now and above and now.value and above.value:
            rise = (now.value - above.value) * (1 if cell.at.get("direction") == "up" else -1)
            other = "" if rise > 0 else f"it changes by {-rise:.4g} the other way"
            ours = replace(now, value=None if other else rise, reason=other)
        filled.append((cell, ours))
    return tuple(filled)


def _timed(
    paper: Paper, table: PublishedTable, cells: Iterable[Cell], evidence: Evidence, gpu: str
) -> tuple[tuple[Cell, Ours], ...]:
    return tuple((cell, _time(paper, table, cell, evidence, gpu)) for cell in cells)


def _time(paper: Paper, table: PublishedTable, cell: Cell, evidence: Evidence, gpu: str) -> Ours:
    if table.cannot:
        return Ours(None, table.cannot)
    if "new_tokens" in cell.at:
        return _generation(paper, table, cell, evidence, gpu)
    label, shape = paper.kernel(cell), shape_of(table, cell)
    row = evidence.times.get((gpu, label, table.cache, *shape))
    if row is None or row.median_us is None:
        return Ours(None, f"{label} was not timed here", label)
    their_us = _us_of(cell, shape)
    bits = bits_of(label) if paper.bits_of_weights(cell) is None else paper.bits_of_weights(cell)
    value = _in_unit(cell, row.median_us, shape)
    shares = (
        _share(bits_of(label), shape, row.median_us, gpu),
        _share(bits, shape, their_us, table.hardware.removesuffix(" (inferred)")),
    )
    brief = row.protocol_version >= BRIEF_VERSIONS
    return Ours(value, "", label, "", *shares, brief=brief, accepted=row.accepted)


def shape_of(table: PublishedTable, cell: Cell) -> tuple[int, int, int]:
    """Return m, n and k of a cell of a kernel table."""
    m, n, k = (int(cell.at.get(name, table.setting.get(name, 0))) for name in "mnk")
    return m, n, k


def bits_of(label: str) -> int | None:
    """Return the bits of a kernel's weights, as its label says; None: it doesn't."""
    match = re.search(r"w(\d+)\*?a\d", label)
    if match:
        return int(match[1])
    return 16 if "fp16" in label else None


def _us_of(cell: Cell, shape: tuple[int, int, int]) -> float | None:
    if cell.value is None:
        return None
    if cell.metric == "throughput":
        return 2 * math.prod(shape) / (cell.value * 1e6)
    return cell.value * _US[cell.unit]


def _in_unit(cell: Cell, us: float, shape: tuple[int, int, int]) -> float:
    return 2 * math.prod(shape) / (us * 1e6) if cell.metric == "throughput" else us / _US[cell.unit]


def _share(
    bits: int | None, shape: tuple[int, int, int], us: float | None, gpu: str
) -> float | None:
    """Return the share of a GPU's bandwidth at which weights were read; None: unknown."""
    if bits is None or us is None:
        return None
    return _bandwidth_share(shape[1] * shape[2] * bits / _BYTE, us, gpu)


def _bandwidth_share(size: float, us: float, gpu: str) -> float | None:
    """Return the share of a GPU's bandwidth at which bytes were read; None: unknown."""
    return size / (us * 1e-6) / (BANDWIDTHS[gpu] * 1e9) if us and gpu in BANDWIDTHS else None


def _generation(
    paper: Paper, table: PublishedTable, cell: Cell, evidence: Evidence, gpu: str
) -> Ours:
    scheme, model = paper.schemes_of(cell)[0], paper.model(str(cell.at["model"]))
    lengths = int(table.setting["input_tokens"]), int(cell.at["new_tokens"])
    row = evidence.decoded.get((gpu, model, scheme, *lengths))
    value = None if row is None else generation_value(row, cell.metric)
    if value is None:
        return Ours(
            None, f"{scheme} of {model} was not decoded here with {lengths[1]} new tokens", scheme
        )
    bits = bits_of(scheme)
    if cell.metric != "latency" or bits is None:
        return Ours(value, "", scheme)
    size = _bytes_of_a_step(model, bits) * lengths[1]
    share = _bandwidth_share(size, value * 1e3, gpu)
    theirs = _bandwidth_share(size, (cell.value or 0.0) * 1e3, table.hardware)
    return Ours(value, "", scheme, "", share, theirs)


def _bytes_of_a_step(model: str, bits: int) -> float:
    """Return the bytes of a model's weights that a decode step reads, with an FP16 head."""
    spec = get_model(model)
    layers = sum(layer.n * layer.k * layer.count for layer in spec.linear_layers())
    return layers * bits / _BYTE + 2 * spec.vocab * spec.hidden


def generation_value(row: DecodeRow, metric: str) -> float | None:
    """Return the latency of a whole generation in ms, or the peak memory in GB."""
    if metric == "memory":
        return None if row.peak_memory_bytes is None else row.peak_memory_bytes / 1e9
    if row.token_ms is None:
        return None
    return (row.prefill_ms or 0.0) + row.token_ms * (row.new_tokens - 1)


def _judged(
    paper: Paper, table: PublishedTable, gpu: str, rows: tuple[tuple[Cell, Ours], ...]
) -> TableResult:
    measured = [(cell, ours) for cell, ours in rows if None not in (cell.value, ours.value)]
    if not measured:
        why = _why_none(paper, table, rows)
        return TableResult(paper, table, "", rows, "not here", f"can't be run here since {why}")
    stands_in = sorted({ours.model for _, ours in measured if ours.model})
    held, others = _orders(measured, drop_model=bool(stands_in))
    pairs = held + len(others)
    factor, worst = _largest_factor(measured) if not stands_in else (None, "")
    within = WITHIN_SCORE if not gpu else WITHIN
    share = f"order holds in {held} of {pairs} pairs"
    where = f" on {stands_in[0]}, not the paper's models" if stands_in else ""
    printed = sum(cell.value is not None for cell, _ in rows)
    few = "" if len(measured) == printed else f"; {len(measured)} of {printed} numbers have ours"
    few += "; brief times" if any(ours.brief for _, ours in measured) else ""
    if not all(ours.accepted for _, ours in measured):
        few += "; some in a checkout with changes, or beside other programs"
    kind: VerdictKind
    if not pairs:
        reason = _why_none(paper, table, rows)
        return TableResult(
            paper, table, gpu, rows, "not here",
            f"can't be judged here since nothing that it compares is measured: {reason}{few}",
        )  # fmt: skip
    if factor is not None and factor <= within and held >= MOST * pairs:
        kind, text = "reproduced", f"reproduced within {factor:.2f}x; {share}"
    elif held >= MOST * pairs:
        kind, text = "order holds", share if held == pairs else f"{share}, mostly"
        if factor is not None:
            text += f"; ratios differ by up to {factor:.1f}x ({worst})"
    else:
        kind = "differs"
        because = f"{' and '.join(others[0])} are in the other order"
        because += f" ({table.differs or worst})" if table.differs or worst else ""
        text = f"differs since {because}; {share}"
    return TableResult(
        paper, table, gpu, rows, kind, f"{text}{where}{few}", held, pairs, factor
    )  # fmt: skip


def _why_none(paper: Paper, table: PublishedTable, rows: Iterable[tuple[Cell, Ours]]) -> str:
    """Return why a table is not judged: of accuracy, the models that were not evaluated."""
    if table.cannot:
        return table.cannot
    if is_of_scores(table):
        named = {paper.model(str(cell.at.get("model", ""))) for cell, _ in rows} - {""}
        return f"no folder of {', '.join(sorted(named))} was evaluated (--model FOLDER)"
    counted = Counter(ours.reason for _, ours in rows if ours.reason)
    return counted.most_common(1)[0][0]


def _orders(
    measured: Sequence[tuple[Cell, Ours]], *, drop_model: bool
) -> tuple[int, list[tuple[str, str]]]:
    """Count the pairs with the printed order, and name those with another one.

    Only pairs whose printed order is clear and the same in all their places. Scores of ours must be
    as clear, and accuracies differ by more than their standard error.
    drop_model: ours are of one model, so that a pair's places are of all models.
    """
    groups: dict[Any, list[tuple[Cell, Ours]]] = defaultdict(list)
    for cell, ours in measured:
        if cell.value is not None and math.isfinite(cell.value) and cell.value > 0:
            groups[cell.place].append((cell, ours))
    signs: dict[Any, set[tuple[int, int]]] = defaultdict(set)
    for place, group in groups.items():
        for (a, ours_a), (b, ours_b) in combinations(group, 2):
            if ours_a.name == ours_b.name or not ours_a.value or not ours_b.value:
                continue
            if abs(ours_a.value - ours_b.value) < math.hypot(ours_a.error, ours_b.error):
                continue
            theirs = math.log((a.value or 1) / (b.value or 1))
            measured_log = math.log(ours_a.value / ours_b.value)
            if a.metric in SCORES and abs(measured_log) < _CLEAR * _scale_of(a):
                continue
            sign = 0 if abs(theirs) < _CLEAR * _scale_of(a) else int(math.copysign(1, theirs))
            kept = tuple(p for p in place if not (drop_model and p[:1] == ("model",)))
            key = (kept, *sorted((ours_a.name, ours_b.name)))
            flip = 1 if ours_a.name <= ours_b.name else -1
            signs[key].add((flip * sign, flip * int(math.copysign(1, measured_log))))
    clear = {
        key: of
        for key, of in signs.items()
        if len({theirs for theirs, _ in of}) == 1 and next(iter(of))[0] != 0
    }
    others = [(key[1], key[2]) for key, of in clear.items() if any(t != o for t, o in of)]
    return len(clear) - len(others), others


def _scale_of(cell: Cell) -> float:
    """Orders of scores are clear at smaller differences than those of times."""
    return 0.2 if cell.metric in SCORES else 1.0


def _largest_factor(measured: Sequence[tuple[Cell, Ours]]) -> tuple[float | None, str]:
    """Return the largest factor between theirs and ours of ratios to a group's first number."""
    first: dict[Any, tuple[Cell, Ours]] = {}
    worst: tuple[float, str] | None = None
    for cell, ours in measured:
        if not cell.value or not ours.value or not math.isfinite(cell.value) or cell.value < 0:
            continue
        base, base_ours = first.setdefault(cell.place, (cell, ours))
        if base is cell or not base.value or not base_ours.value:
            continue
        log = math.log(ours.value / base_ours.value) - math.log(cell.value / base.value)
        factor = math.exp(abs(log))
        if worst is None or factor > worst[0]:
            about = f"{ours.name or cell.subject} over {base_ours.name or base.subject}"
            if None not in (ours.share, ours.their_share, base_ours.share, base_ours.their_share):
                of_base = (base_ours.their_share, base_ours.share)
                of_cell = (ours.their_share, ours.share)
                about += f": shares of bandwidth {_change(of_cell)}, over {_change(of_base)}"
            worst = (factor, about)
    return worst if worst is not None else (None, "")


def _change(shares: tuple[float | None, float | None]) -> str:
    theirs, ours = (0.0 if share is None else share for share in shares)
    return f"{theirs:.0%} there, {ours:.0%} here"


@dataclass(frozen=True, slots=True)
class Average:
    """Mean ratios of one subject to another over all places where both have a number.

    theirs, ours: the arithmetic and the geometric mean; ours None: nothing is measured.
    """

    subject: str
    over: str
    count: int
    theirs: tuple[float, float]
    ours: tuple[float, float] | None


def averages(result: TableResult) -> list[Average]:
    """Return the mean speed-ups of a table of kernels, over the cells of lower-is-better metrics.

    Of a few subjects every later one is compared with every earlier one; of many bit widths the
    first kernel with the others at the same width.
    """
    places: dict[Any, dict[str, tuple[Cell, Ours]]] = defaultdict(dict)
    widths: dict[str, str] = {}
    for cell, ours in result.cells:
        if "kernel" in cell.at and cell.value and cell.better == result.table.better:
            places[cell.place][cell.subject] = (cell, ours)
            widths[cell.subject] = str(cell.at.get("scheme", ""))
    if len(widths) > _MANY_SUBJECTS:
        of_width: dict[str, list[str]] = {}
        for subject, width in widths.items():
            of_width.setdefault(width, []).append(subject)
        pairs = [(other, first) for first, *others in of_width.values() for other in others]
    else:
        pairs = list(combinations(widths, 2))
    found = []
    for base, subject in pairs:
        both = [(of[base], of[subject]) for of in places.values() if base in of and subject in of]
        if not both:
            continue
        theirs = [_speedup(a[0].value, b[0].value, a[0].better) for a, b in both]
        measured = [
            _speedup(a[1].value, b[1].value, a[0].better)
            for a, b in both
            if a[1].value and b[1].value
        ]
        means = _both_means(measured) if measured else None
        found.append(Average(subject, base, len(both), _both_means(theirs), means))
    return found


def _speedup(base: float | None, value: float | None, better: str) -> float:
    assert base
    assert value
    return value / base if better == "higher" else base / value


def _both_means(ratios: Sequence[float]) -> tuple[float, float]:
    return sum(ratios) / len(ratios), math.exp(sum(map(math.log, ratios)) / len(ratios))

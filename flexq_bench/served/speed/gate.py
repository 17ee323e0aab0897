"""Speed of two engines in turns, judged as kernels are: looks, verdicts and limits.

A block is base, head, head, base, with the same requests to both engines in each half; in a
placement of engines that take turns it is base's segments and then head's, in the next one head's
first. The unit of the statistics is a placement (flexq_bench.verdicts.confirmation). A metric that
is better if it is higher is judged by its reciprocal, so slower always means worse.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flexq_bench.db.records import GateLimit
from flexq_bench.errors import InfrastructureError, UsageError
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.measure.ab.looks import look_by_look
from flexq_bench.measure.ab.rules import confirm_comparisons
from flexq_bench.served.client import Limits
from flexq_bench.served.engines import EngineSpec, RunningEngine
from flexq_bench.served.speed.load import Segment, run_segment
from flexq_bench.served.speed.metrics import Metric, pooled_interval, segment_value
from flexq_bench.served.speed.places import SIDES, Places, Side
from flexq_bench.served.speed.policy import SpeedTable
from flexq_bench.stats.paired import loss_p_value
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm
from flexq_bench.verdicts.limits import detectable_percent, exceeds, is_enough, is_within

_MAX_FAILED = 0.1  # share of requests, above which the others say little of the speed
_FAILED_ALPHA = 0.01  # of more failures of head
_STEADY = 0.05  # relative fall of the median time per token between two batches of a warm-up
_MAX_WARMUPS = 8  # batches

OnProgress = Callable[[str], object]


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A metric of a table: what has a limit."""

    table: SpeedTable
    metric: Metric

    @property
    def limit(self) -> float:
        return self.table.limit_of(self.metric)


@dataclass(slots=True)
class Measured:
    """The segments of a table, by placement, block and side, in the order of measurement."""

    table: SpeedTable
    placements: list[list[dict[Side, list[Segment]]]] = field(default_factory=list)

    def segments(self, side: Side) -> list[Segment]:
        return [one for blocks in self.placements for block in blocks for one in block[side]]

    def values(self, of: Metric) -> list[list[tuple[float, float]]]:
        """Return the metric of both sides, by placement and block: geometric means of segments."""
        limits = self.table.latency_limits

        def mean(segments: Sequence[Segment]) -> float:
            values = np.array([segment_value(of, one, limits) for one in segments])
            return float(np.exp(np.log(values).mean()))

        return [
            [(mean(block["base"]), mean(block["head"])) for block in blocks]
            for blocks in self.placements
        ]

    def failures(self) -> tuple[int, int, int]:
        """Return requests that only base answered, those that only head did, and all."""
        pairs = [
            (mine.is_ok, other.is_ok)
            for base, head in zip(self.segments("base"), self.segments("head"), strict=True)
            for mine, other in zip(base.times, head.times, strict=True)
        ]
        return pairs.count((True, False)), pairs.count((False, True)), len(pairs)


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """Limits with their outcomes, the comparisons behind them, and what was measured.

    problem: why it ended early, one line; empty: it did not.
    """

    limits: tuple[GateLimit, ...]
    comparisons: tuple[CaseComparison, ...]
    measured: tuple[Measured, ...]
    problem: str = ""


def judge_speed(
    tables: Sequence[SpeedTable],
    base: EngineSpec,
    head: EngineSpec,
    gpus: Sequence[str] = (),
    *,
    power: float = 0.9,
    seed: int = 0,
    rules: InterleaveRules | None = None,
    model: str | None = None,
    on_progress: OnProgress = lambda text: None,
    **starting: object,
) -> SpeedReport:
    """Measure the tables' loads on both engines in turns, until each limit is decided.

    power: of the smallest detectable loss that is reported. rules: number of placements, blocks and
    looks; its `budget_s` ends the measurement. starting: further arguments of Places. If an engine
    fails, what was measured before is judged and returned, with the reason. Raises UsageError for a
    trace that can't be read.
    """
    rules = rules or InterleaveRules()
    if len({table.name for table in tables}) < len(tables):
        raise UsageError("two tables of speed have one name: give each its own")
    run = _Run(tables, {"base": base, "head": head}, seed, rules.blocks, on_progress)
    began = time.monotonic()
    problem = ""

    def is_over() -> bool:
        return bool(problem) or (
            rules.budget_s is not None and time.monotonic() - began > rules.budget_s
        )

    with Places(run.engines, gpus, warm=run.warm, model=model, **starting) as places:  # type: ignore[arg-type]

        def measure(wanted: Sequence[Judged], placements: int) -> None:
            nonlocal problem
            try:
                for index in range(placements):
                    if is_over():
                        return
                    due = dict.fromkeys(
                        one.table.name
                        for one in wanted
                        if len(run.measured[one.table.name].placements) == index
                    )
                    if due:
                        run.placement(places, index, [run.measured[name] for name in due])
            except InfrastructureError as error:
                problem = str(error)

        def values(one: Judged) -> list[list[tuple[float, float]]]:
            return run.measured[one.table.name].values(one.metric)

        comparisons = judge_looks(run.judged, rules, measure, values, run.compared, is_over)
    limits = [
        limit
        for name, measured in run.measured.items()
        for limit in _limits(
            measured,
            [
                (one, c)
                for one, c in zip(run.judged, comparisons, strict=True)
                if one.table.name == name
            ],
            power=power,
            seed=seed,
            problem=problem,
        )
    ]
    return SpeedReport(tuple(limits), comparisons, tuple(run.measured.values()), problem)


def judge_looks(
    judged: Sequence[Judged],
    rules: InterleaveRules,
    measure: Callable[[Sequence[Judged], int], None],
    values: Callable[[Judged], list[list[tuple[float, float]]]],
    compared: Callable[[Judged, Comparison], CaseComparison],
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[CaseComparison, ...]:
    """Measure placements look by look until each metric is decided; return results in order.

    measure: until there are so many placements. values: of a metric, by placement and block, base's
    and head's. compared: the comparison of a metric as a result. See measure.ab.looks.
    """
    by_case: dict[str, Judged] = {}

    def judge(one: Judged) -> CaseComparison:
        result = compared(one, comparison_of(one.metric, values(one)))
        by_case[result.case.key] = one
        return result

    def suffices(result: CaseComparison, decided: bool) -> bool:
        return is_enough(result.confirmation, by_case[result.case.key].limit, decided=decided)

    own = replace(rules, suffices=suffices)
    results = {
        by_case[result.case.key]: result
        for result in look_by_look(judged, own, measure, judge, is_over)
    }
    return confirm_comparisons([results[one] for one in judged], own)


def comparison_of(of: Metric, values: Sequence[Sequence[tuple[float, float]]]) -> Comparison:
    """Return the blocks of a metric as verdicts take them: as costs, lower if it is better."""
    rows = [
        (of.cost(base), of.cost(head), placement)
        for placement, blocks in enumerate(values)
        for base, head in blocks
    ]
    base, head, placement = zip(*rows, strict=True) if rows else ((), (), ())
    return Comparison(tuple(base), tuple(head), tuple(placement))


class _Run:
    """Measures placements of both engines, and keeps what was measured."""

    def __init__(
        self,
        tables: Sequence[SpeedTable],
        engines: Mapping[Side, EngineSpec],
        seed: int,
        blocks: int,
        on_progress: OnProgress,
    ) -> None:
        self.engines = engines
        self.measured = {table.name: Measured(table) for table in tables}
        self.judged = [Judged(table, metric) for table in tables for metric in table.judged]
        self._traces = {table.name: table.recorded() for table in tables}
        self._seed, self._blocks, self._on_progress = seed, blocks, on_progress
        self._model = ""

    def compared(self, one: Judged, comparison: Comparison) -> CaseComparison:
        case = one.table.case(self._model, one.metric)
        labels = (self.engines["base"].label, self.engines["head"].label)
        return CaseComparison(case, *labels, comparison, confirm(comparison))

    def warm(self, side: Side, engine: RunningEngine) -> None:
        """Send requests that don't count, until the times per token are steady."""
        self._model = self._model or engine.model
        for measured in self.measured.values():
            table = measured.table
            if not table.warmup_requests:
                continue
            before = math.inf
            for batch in range(_MAX_WARMUPS):
                own = table.model_copy(update={"requests": table.warmup_requests})
                segment = self._segment(own, engine, 0, (batch, 1))
                tokens = [one.tpot_s for one in segment.times if one.tpot_s]
                now = float(np.median(tokens)) if tokens else 0.0
                if now >= (1 - _STEADY) * before:
                    break
                before = now
            else:
                self._on_progress(f"{side}: it still gets faster after {_MAX_WARMUPS} warm-ups")

    def placement(self, places: Places, index: int, due: Sequence[Measured]) -> None:
        """Measure the blocks of a placement of these tables. Raises EngineError."""
        names = ", ".join(measured.table.name for measured in due)
        self._on_progress(f"placement {index + 1}: {names}")
        found: dict[str, list[dict[Side, list[Segment]]]] = {
            measured.table.name: [{"base": [], "head": []} for _ in range(self._blocks)]
            for measured in due
        }
        halves = [(block, half) for block in range(self._blocks) for half in (0, 1)]
        order: list[tuple[Side, int, int]]
        if places.takes_turns:
            first = SIDES if index % 2 == 0 else SIDES[::-1]
            order = [(side, block, half) for side in first for block, half in halves]
        else:
            order = [
                (side, block, half)
                for block, half in halves
                for side in (SIDES if half == 0 else SIDES[::-1])
            ]
        for side, block, half in order:
            engine = places.engine(side, index)
            for measured in due:
                table = measured.table
                number = (index * self._blocks + block) * 2 + half
                segment = self._segment(table, engine, number, (number, 0))
                found[table.name][block][side].append(segment)
                if segment.failed == len(segment.times):
                    reason = engine.died() or f"all requests failed: {segment.times[0].problem}"
                    raise InfrastructureError(f"{side}: {reason}")
                time.sleep(table.cooldown_s)
        for measured in due:
            measured.placements.append(found[measured.table.name])

    def _segment(
        self, table: SpeedTable, engine: RunningEngine, number: int, key: tuple[int, int]
    ) -> Segment:
        seed = int(np.random.SeedSequence((self._seed, *key)).generate_state(1)[0])
        return run_segment(
            engine,
            table.segment(self._traces[table.name], number, seed),
            concurrency=table.concurrency if table.arrivals == "closed" else None,
            seed=seed,
            limits=Limits(total_s=table.request_timeout_s),
        )


def _limits(
    measured: Measured,
    results: Sequence[tuple[Judged, CaseComparison]],
    *,
    power: float,
    seed: int,
    problem: str,
) -> list[GateLimit]:
    """Return the outcomes of a table: of failed requests, then of each metric."""
    table = measured.table
    only_base, only_head, count = measured.failures()
    failed = {
        side: sum(one.failed for one in measured.segments(side)) / max(count, 1) for side in SIDES
    }
    fails = loss_p_value(only_base, only_head) < _FAILED_ALPHA
    none = not count
    limits = [
        GateLimit(
            check=f"speed {table.name}: failed requests",
            limit="not more than base's",
            outcome="not judged" if none else "fail" if fails else "pass",
            reason=problem
            if none
            else f"only head failed {only_base} of {count}, only base {only_head}",
            base=None if none else 100 * failed["base"],
            value=None if none else 100 * failed["head"],
            change=None if none else 100 * (failed["head"] - failed["base"]),
            low=None,
            high=None,
            unit="%",
        )
    ]
    too_many = max(failed.values()) > _MAX_FAILED
    for one, result in results:
        now, of = result.confirmation, one.metric
        sides = [
            pooled_interval(of, measured.segments(side), table.latency_limits, seed=seed)
            if count
            else None
            for side in SIDES
        ]
        base, head = (None if side is None else side.estimate for side in sides)
        known = math.isfinite(now.log_ratio)
        outcome, reason = _outcome(result, one.limit), now.reason
        if too_many:
            outcome, reason = "not judged", f"{100 * max(failed.values()):.0f} % of requests failed"
        elif problem and outcome != "fail":
            outcome, reason = "not judged", problem
        ends = sorted((of.change_percent(now.low), of.change_percent(now.high))) if known else None
        limits.append(
            GateLimit(
                check=f"speed {table.name}: {of.name}",
                limit=f"at most {one.limit:g} % {'more' if of.is_lower_better else 'less'}",
                outcome=outcome,
                reason=reason,
                base=base,
                value=head,
                change=of.change_percent(now.log_ratio) if known else None,
                low=ends[0] if ends else None,
                high=ends[1] if ends else None,
                unit="%",
                detectable=detectable_percent(result.comparison, one.limit, power=power),
                coverage=f"{now.placements} placements, {now.blocks} blocks",
                details=tuple(
                    f"{name}: {side.estimate:.4g} {of.unit}, 95 % interval {side.low:.4g} to "
                    f"{side.high:.4g}"
                    for name, side in zip(SIDES, sides, strict=True)
                    if side is not None
                ),
            )
        )
    return limits


def _outcome(result: CaseComparison, limit: float) -> str:
    """Return one of GATE_OUTCOMES."""
    now = result.confirmation
    if exceeds(now, limit):
        return "fail"
    if now.verdict is Verdict.NO_DATA:
        return "not judged"
    if now.verdict is Verdict.AMBIGUOUS and not is_within(now, limit):
        return "ambiguous"
    return "pass"

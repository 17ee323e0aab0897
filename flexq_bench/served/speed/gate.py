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
from flexq_bench.served.engines import RunningEngine
from flexq_bench.served.speed.load import Segment, run_segment
from flexq_bench.served.speed.metrics import Metric, metric, pooled_interval, segment_value
from flexq_bench.served.speed.policy import SpeedTable
from flexq_bench.served.turns import BASE, HEAD, Turns
from flexq_bench.stats.paired import ItemDifference, item_difference, loss_p_value
from flexq_bench.verdicts import CaseComparison, Comparison, Verdict, confirm
from flexq_bench.verdicts.alert_rule import FEWEST_PLACEMENTS
from flexq_bench.verdicts.limits import detectable_percent, exceeds, is_enough, is_within

_MAX_FAILED = 0.1  # share of requests, above which the others say little of the speed
_FAILED_ALPHA = 0.01  # of more failures of head
_LEAST_TEXT = 0.5  # of the other engine's characters per token, for the same prompts
_WARMING = 2.0  # times that tokens take longer at first than later
_STEADY = 0.05  # relative fall of the median time per token between two batches of a warm-up
_MAX_WARMUPS = 8  # batches
_PLACEMENTS_A_PLACE = 3  # after which engines that both run change places

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
    placements: list[list[dict[str, list[Segment]]]] = field(default_factory=list)

    def segments(self, side: str) -> list[Segment]:
        return [
            segment for blocks in self.placements for block in blocks for segment in block[side]
        ]

    def values(self, of: Metric) -> list[list[tuple[float, float]]]:
        """Return the metric of both sides, by placement and block: geometric means of segments."""
        limits = self.table.latency_limits

        def mean(segments: Sequence[Segment]) -> float:
            values = np.array([segment_value(of, segment, limits) for segment in segments])
            # Tokens that arrive together have no time between them, and a ratio of none.
            return float(np.exp(np.log(np.where(values > 0, values, np.nan)).mean()))

        return [
            [(mean(block[BASE]), mean(block[HEAD])) for block in blocks]
            for blocks in self.placements
        ]

    def failed_share(self, side: str) -> float:
        """Return the share of an engine's requests that failed; 0 if there is none."""
        segments = self.segments(side)
        return sum(segment.failed for segment in segments) / max(
            1, sum(len(segment.times) for segment in segments)
        )

    def characters_per_token(self, side: str) -> float:
        """Return the characters of an engine's answers for each token that it counts."""
        times = [request for segment in self.segments(side) for request in segment.times]
        tokens = sum(request.new_tokens for request in times)
        return sum(request.characters for request in times) / max(1, tokens)

    @property
    def unsound(self) -> str:
        """Say why times say little: an engine failed many requests, or counts tokens that it does
        not send. Empty: neither did.
        """
        side = max((HEAD, BASE), key=self.failed_share)
        if (share := self.failed_share(side)) > _MAX_FAILED:
            return f"{side}: {100 * share:.0f} % of requests failed"
        other, side = sorted((BASE, HEAD), key=self.characters_per_token, reverse=True)
        most, least = map(self.characters_per_token, (other, side))
        if least >= _LEAST_TEXT * most:
            return ""
        return f"{side}: {least:.2g} characters a token, {other}: {most:.2g}: it sends less text"

    @property
    def warming(self) -> str:
        """Say which engine was slow only at first, in the first placement, or in the first segment
        of most placements if it starts anew for each. Empty: none was.
        """
        of, limits = metric("median_tpot"), self.table.latency_limits
        for side in (HEAD, BASE):
            times = np.array(
                [
                    [segment_value(of, part, limits) for block in blocks for part in block[side]]
                    for blocks in self.placements
                ]
            )
            if len(times) < FEWEST_PLACEMENTS:
                break
            with np.errstate(divide="ignore", invalid="ignore"):  # tokens that arrive together
                of_first = float(np.median(times[0]) / np.median(times[1:]))
                slower = max(of_first, float(np.median(times[:, 0] / times[:, -1])))
            if slower >= _WARMING:
                return f"{side}: {slower:.1f} times slower at first: raise warmup_requests"
        return ""

    def failures(self) -> ItemDifference:
        """Return the difference of the shares of failed requests; both got the same ones."""
        sides = (
            [not request.is_ok for segment in self.segments(side) for request in segment.times]
            for side in (BASE, HEAD)
        )
        return item_difference(*sides)


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """Limits with their outcomes, the comparisons behind them, and what was measured.

    model: that both were asked for. problem: why it ended early, one line; empty: it did not.
    """

    limits: tuple[GateLimit, ...]
    comparisons: tuple[CaseComparison, ...]
    measured: tuple[Measured, ...]
    model: str = ""
    problem: str = ""

    @property
    def sound(self) -> tuple[CaseComparison, ...]:
        """Comparisons of loads that both engines, warm, answered, nearly all and in full."""
        loads = [measured for measured in self.measured for _ in measured.table.judged]
        pairs = zip(loads, self.comparisons, strict=True)
        return tuple(compared for load, compared in pairs if not (load.unsound or load.warming))


def judge_speed(
    tables: Sequence[SpeedTable],
    turns: Turns,
    *,
    power: float = 0.9,
    seed: int = 0,
    rules: InterleaveRules | None = None,
    labels: Mapping[str, str] | None = None,
    key: str | None = None,
    failure: str = "",
    on_progress: OnProgress = lambda text: None,
) -> SpeedReport:
    """Measure the tables' loads on both engines in turns, until each limit is decided.

    power: of the smallest detectable loss that is reported. rules: number of placements, blocks and
    looks; if it has `suffices`, that says when a metric needs no more; its `budget_s` ends the
    measurement. labels: of base and head in the comparisons; None: these words. key: sent to both
    as a bearer token. failure: of an engine before, one line: then nothing is measured. If an
    engine fails, what was measured before is judged and returned, with the reason. Raises
    UsageError for a trace that can't be read, or two tables of one name.
    """
    if len({table.name for table in tables}) < len(tables):
        raise UsageError("two tables of speed have one name: give each its own")
    rules = rules or InterleaveRules()
    run = _Run(tables, turns, seed, rules.blocks, key, on_progress)
    names = {BASE: BASE, HEAD: HEAD, **(labels or {})}
    began = time.monotonic()
    problem = failure

    def model() -> str:
        return turns.models.get(BASE, "") or turns.models.get(HEAD, "")

    def is_over() -> bool:
        late = rules.budget_s is not None and time.monotonic() - began > rules.budget_s
        return late or bool(problem)

    def measure(wanted: Sequence[Judged], placements: int) -> None:
        nonlocal problem
        try:
            for index in range(placements):
                due = [
                    measured
                    for measured in run.measured.values()
                    if len(measured.placements) == index
                    and any(target.table is measured.table for target in wanted)
                ]
                if is_over():
                    return
                if due:
                    run.placement(index, due)
        except InfrastructureError as error:
            problem = str(error)

    def values(target: Judged) -> list[list[tuple[float, float]]]:
        return run.measured[target.table.name].values(target.metric)

    def compared(target: Judged, comparison: Comparison) -> CaseComparison:
        case = target.table.case(model(), target.metric)
        return CaseComparison(case, names[BASE], names[HEAD], comparison, confirm(comparison))

    comparisons = judge_looks(run.judged, rules, measure, values, compared, is_over)
    results = list(zip(run.judged, comparisons, strict=True))
    limits: list[GateLimit] = []
    for measured in run.measured.values():
        own = [(target, result) for target, result in results if target.table is measured.table]
        limits += _limits(measured, own, power=power, seed=seed, problem=problem)
    return SpeedReport(tuple(limits), comparisons, tuple(run.measured.values()), model(), problem)


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

    def judge(target: Judged) -> CaseComparison:
        result = compared(target, comparison_of(target.metric, values(target)))
        by_case[result.case.key] = target
        return result

    def suffices(result: CaseComparison, decided: bool) -> bool:
        return is_enough(result.confirmation, by_case[result.case.key].limit, decided=decided)

    own = rules if rules.suffices is not None else replace(rules, suffices=suffices)
    results = {
        by_case[result.case.key]: result
        for result in look_by_look(judged, own, measure, judge, is_over)
    }
    return confirm_comparisons([results[target] for target in judged], own)


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
        turns: Turns,
        seed: int,
        blocks: int,
        key: str | None,
        on_progress: OnProgress,
    ) -> None:
        self.measured = {table.name: Measured(table) for table in tables}
        self.judged = [Judged(table, metric) for table in tables for metric in table.judged]
        self._traces = {table.name: table.recorded() for table in tables}
        self._turns, self._seed, self._blocks, self._key = turns, seed, blocks, key
        self._on_progress = on_progress
        self._warm: dict[str, RunningEngine] = {}

    def placement(self, index: int, due: Sequence[Measured]) -> None:
        """Measure the blocks of a placement of these tables.

        Engines that share a place start anew; those that both run change places after every third
        placement. Raises InfrastructureError if an engine fails.
        """
        self._on_progress(
            f"placement {index + 1}: {', '.join(measured.table.name for measured in due)}"
        )
        turns = self._turns
        halves = [(block, half) for block in range(self._blocks) for half in (0, 1)]
        if turns.share_a_place:
            turns.end()
            order = [(side, *place) for side in turns.order(index) for place in halves]
        else:
            if index and index % _PLACEMENTS_A_PLACE == 0:
                turns.swap()
            order = [(side, *place) for place in halves for side in turns.order(place[1])]
        segments: dict[str, list[dict[str, list[Segment]]]] = {
            measured.table.name: [{BASE: [], HEAD: []} for _ in range(self._blocks)]
            for measured in due
        }
        for side, block, half in order:
            engine = self._warmed(side)
            for measured in due:
                table = measured.table
                number = (index * self._blocks + block) * 2 + half
                segment = self._segment(table, engine, number, (number, 0))
                segments[table.name][block][side].append(segment)
                if segment.failed == len(segment.times):
                    reason = engine.died() or segment.times[0].problem
                    raise InfrastructureError(f"{side}: all requests failed: {reason}")
                time.sleep(table.cooldown_s)
        for measured in due:
            measured.placements.append(segments[measured.table.name])

    def _warmed(self, side: str) -> RunningEngine:
        """Return an engine, after requests that don't count, until times per token are steady."""
        engine = self._turns.engine(side)
        if self._warm.get(side) is engine:
            return engine
        for measured in self.measured.values():
            table = measured.table
            if not table.warmup_requests:
                continue
            own = table.model_copy(update={"requests": table.warmup_requests})
            before = math.inf
            for batch in range(_MAX_WARMUPS):
                segment = self._segment(own, engine, 0, (batch, 1))
                tokens = [request.tpot_s for request in segment.times if request.tpot_s]
                now = float(np.median(tokens)) if tokens else 0.0
                if now >= (1 - _STEADY) * before:
                    break
                before = now
            else:
                self._on_progress(f"{side}: it still gets faster after {_MAX_WARMUPS} warm-ups")
        self._warm[side] = engine
        return engine

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
            key=self._key,
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
    limits = [judge_failed(measured, problem)]
    for target, result in results:
        now, of = result.confirmation, target.metric
        sides = [
            pooled_interval(of, measured.segments(side), table.latency_limits, seed=seed)
            if measured.placements
            else None
            for side in (BASE, HEAD)
        ]
        base, head = (None if side is None else side.estimate for side in sides)
        known = math.isfinite(now.log_ratio)
        outcome, reason = _outcome(result, target.limit), now.reason
        if doubt := measured.unsound or (outcome != "pass" and measured.warming):
            outcome, reason = "not judged", doubt
        elif problem and outcome != "fail":
            outcome, reason = "not judged", problem
        ends = sorted((of.change_percent(now.low), of.change_percent(now.high))) if known else None
        limits.append(
            GateLimit(
                check=f"speed {table.name}: {of.name}",
                limit=f"at most {target.limit:g} % {'more' if of.is_lower_better else 'less'}",
                outcome=outcome,
                reason=reason,
                base=base,
                value=head,
                change=of.change_percent(now.log_ratio) if known else None,
                low=ends[0] if ends else None,
                high=ends[1] if ends else None,
                unit="%",
                detectable=detectable_percent(result.comparison, target.limit, power=power),
                coverage=f"{now.placements} placements, {now.blocks} blocks",
                details=tuple(
                    f"{name}: {side.estimate:.4g} {of.unit}, 95 % interval {side.low:.4g} to "
                    f"{side.high:.4g}"
                    for name, side in zip((BASE, HEAD), sides, strict=True)
                    if side is not None
                ),
            )
        )
    return limits


def judge_failed(measured: Measured, problem: str = "") -> GateLimit:
    """Return the outcome of failed requests: by McNemar's exact test, and by the policy's limit.

    problem: why no request was sent.
    """
    table = measured.table
    limit = GateLimit(
        check=f"speed {table.name}: failed requests",
        limit=f"at most {table.failed_percent:g} % more than base's",
        outcome="not judged",
        reason=problem,
        base=None,
        value=None,
        change=None,
        low=None,
        high=None,
        unit="%",
    )
    if not measured.placements:
        return limit
    difference = measured.failures()
    base, head = (100 * measured.failed_share(side) for side in (BASE, HEAD))
    outcome = "pass"
    if loss_p_value(difference.only_head, difference.only_base) < _FAILED_ALPHA:
        outcome = "fail"
    elif head - base > table.failed_percent:
        outcome = "ambiguous"
    return replace(
        limit,
        outcome=outcome,
        reason=f"{difference.only_head} that only head failed, {difference.only_base} only base",
        base=base,
        value=head,
        change=head - base,
        low=100 * difference.interval.low,
        high=100 * difference.interval.high,
    )


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

"""The course of a comparison, from cases to results: wrong results first, then pairs of processes.

All cases whose sides run the same code share each pair of processes, in an order that is drawn for
each pair. Cases that are decided drop out (flexq_bench.measure.ab.looks).
"""

from __future__ import annotations

import math
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from flexq_bench.measure.ab.blocks import (
    MAX_SLOWED,
    MOST_ALONE,
    Block,
    CasePair,
    CaseSide,
    FailedInputs,
    check_results,
    measure_blocks,
    run_again,
    run_alone,
)
from flexq_bench.measure.ab.experiment import ABExperiment, Side
from flexq_bench.measure.ab.looks import look_by_look
from flexq_bench.measure.ab.rules import ComparisonProgress, OnProgress
from flexq_bench.measure.ab.worker_pairs import (
    WorkerPairs,
    Workers,
    available_cpus,
    can_start_beside,
)
from flexq_bench.measure.device import device_infos
from flexq_bench.measure.device_lock import devices_alone
from flexq_bench.measure.meter import WARM_S
from flexq_bench.measure.worker_process import RefusedError, WorkerError, WorkerProcess
from flexq_bench.verdicts import CaseComparison, Verdict
from flexq_bench.workloads.case import Case

CasesOfBoth = Sequence[tuple[Case, Case]]  # base's and head's
_MOST_AT_ONCE = 4  # pairs of processes that get ready together
_FAR = 0.05  # ln


def compare_cases(
    experiments: Sequence[tuple[ABExperiment, CasesOfBoth]],
) -> Iterator[CaseComparison]:
    """Yield one result per pair of cases, those decided early first.

    experiments: with the pairs of cases of each; their device, rules and functions to call are the
    same, and their cases are judged together. The devices that they need are reserved for this
    process until the last result. Raises as ABExperiment.identities, and InfrastructureError if a
    device is not free in time.
    """
    experiments = [(experiment, pairs) for experiment, pairs in experiments if pairs]
    if not experiments:
        return
    first = experiments[0][0]
    gpus = max(base.gpus for _, pairs in experiments for base, _ in pairs)
    uuids = [info.uuid for info in device_infos(first.device, gpus)]
    with devices_alone(uuids), ExitStack() as unused:
        lanes = [
            _Lane(
                experiment,
                [experiment.pair(base, head) for base, head in pairs],
                WorkerPairs(experiment.start, unused.enter_context(ExitStack())),
            )
            for experiment, pairs in experiments
        ]
        for result in _Course(lanes).results():
            if first.on_result is not None:
                first.on_result(result)
            yield result


@dataclass(frozen=True, slots=True)
class _Lane:
    """Cases that share processes."""

    experiment: ABExperiment
    pairs: Sequence[CasePair]
    workers: WorkerPairs


@dataclass
class _Durations:
    """Seconds until a pair of processes is ready, and of a case in it: means of those so far."""

    start_s: list[float] = field(default_factory=list)
    case_s: list[float] = field(default_factory=list)

    def of(self, starts: float, cases: float) -> float | None:
        """Estimated seconds of so many starts and cases; None: not known yet."""
        if not self.start_s or not self.case_s:
            return None
        start_s, case_s = (sum(known) / len(known) for known in (self.start_s, self.case_s))
        return starts * start_s + cases * case_s


class _Course:
    """One comparison: what was measured, what is left, and why it ended early."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = lanes
        self._rules = lanes[0].experiment.rules
        self._seed = lanes[0].experiment.seed
        self._on_progress: OnProgress | None = lanes[0].experiment.on_progress
        self._lane_of = {id(pair): lane for lane in lanes for pair in lane.pairs}
        self._pairs = [pair for lane in lanes for pair in lane.pairs]
        budget_s = self._rules.budget_s
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._wrong = ""  # the case whose wrong result ended the comparison
        self._durations = _Durations()
        # Pairs of processes of each case, by id; None: it has ended.
        self._expected: dict[int, int | None] = {}
        self._measured_at = -math.inf
        self._current = 0  # number of the current pair of processes

    def results(self) -> Iterator[CaseComparison]:
        self._expected = dict.fromkeys(self._lane_of, self._rules.processes)
        self._find_wrong()
        yield from look_by_look(
            *(self._pairs, self._rules, self._measure, self._result, self._is_over, self._expect)
        )

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _is_over(self) -> bool:
        return bool(self._wrong) or self._is_late()

    def _result(self, pair: CasePair) -> CaseComparison:
        result = self._lane_of[id(pair)].experiment.result(pair)
        few = pair.processes < self._rules.processes and not pair.problem
        is_cut = bool(self._wrong) or self._deadline is not None  # also if it can't be afforded
        if not few or not is_cut or result.confirmation.verdict is not Verdict.NO_DATA:
            return result
        reason = f"not timed, because {self._wrong} is wrong"
        if not self._wrong:
            reason = (
                f"the budget of {self._rules.budget_s:g} s ended after {pair.processes} pairs of "
                f"processes, and {self._rules.processes} are needed at least"
            )
        ambiguous = replace(result.confirmation, verdict=Verdict.AMBIGUOUS, reason=reason)
        return replace(
            result, confirmation=ambiguous, detail=reason, pairs_needed=self._rules.processes
        )

    def _find_wrong(self) -> None:
        """Run every case once, untimed, and note which are wrong."""
        for lane in self._lanes:
            waiting: Sequence[CasePair] = lane.pairs
            while waiting and not self._is_over():
                waiting = self._check(lane, waiting)
            self._ask_base(lane, [pair for pair in lane.pairs if pair.head.wrong])
            self._stop_at(lane.pairs)
            if len(self._lanes) > 1:
                # Lanes share the sandboxes of their sides: the end of a worker ends all in its own.
                lane.workers.discard()

    def _check(self, lane: _Lane, pairs: Sequence[CasePair]) -> Sequence[CasePair]:
        """Check cases in the lane's next pair of processes; return those left if one broke."""
        began = time.monotonic()
        base, head = lane.workers.start_ahead()
        lane.experiment.identities(base, head)
        self._durations.start_s.append(time.monotonic() - began)
        for position, pair in enumerate(pairs):
            self._show_progress()
            if self._is_late():
                break
            sides = [(pair.head, head), (pair.base, base)]
            try:
                if base is not head:
                    check_results(sides)
                else:  # of base only where head is wrong
                    check_results(sides[:1])
                    if pair.head.wrong:
                        check_results(sides[1:])
            except RefusedError:
                continue  # measuring it says why, or an older program lacks its default
            except WorkerError as error:
                pair.failure = str(error)
                lane.workers.discard()
                return pairs[position + 1 :]
            if not pair.is_doubted:
                self._stop_at([pair])
            if self._wrong:
                break
            if position == 0 and len(self._lanes) == 1:
                # Those that measure first import while the other results are checked.
                stage = min(self._rules.stages)
                count = self._pairs_at_once(pairs, 0, stage)
                lane.workers.start_ahead(count + self._spare_pairs(0, count, stage))
        return ()

    def _measure(self, pairs: Sequence[CasePair], processes: int) -> None:
        """Measure cases in fresh pairs of processes until each has been in this many."""
        open_pairs = [pair for pair in pairs if not pair.problem]
        process = min((pair.processes for pair in open_pairs), default=processes)
        while process < processes:
            count = self._pairs_at_once(open_pairs, process, processes)
            spare = self._spare_pairs(process, count, processes)
            for lane in self._lanes:
                waiting: Sequence[CasePair] = [
                    pair
                    for pair in open_pairs
                    if self._lane_of[id(pair)] is lane
                    and not pair.problem
                    and pair.processes <= process
                ]
                waiting = self._affordable(waiting, processes - process)
                # A kernel may be affected by those before it; seeded, so that it can be repeated.
                random.Random(f"{self._seed} {process}").shuffle(waiting)
                while waiting and not self._is_over():
                    self._current = process + count
                    waiting = self._pairs_of_processes(
                        *(lane, waiting, process, count, spare),
                        is_last=process + count == processes,
                    )
            process += count
        for lane in self._lanes:
            self._ask_base(lane, open_pairs)
            if lane.experiment.controls_base:
                self._control(lane.experiment, open_pairs)

    def _stop_at(self, pairs: Sequence[CasePair]) -> None:
        """End the comparison if head alone is wrong in one of these cases, and the rules say so."""
        for pair in pairs:
            if pair.head.wrong and not pair.is_as_wrong and self._rules.stops_at_wrong:
                self._wrong = self._wrong or pair.head.case.key

    def _ask_base(self, lane: _Lane, pairs: Sequence[CasePair]) -> None:
        """Run bases again, where nothing of head runs, on inputs on which a result was wrong.

        Head then gets the inputs on which base is wrong.
        """
        experiment = lane.experiment
        doubted: Sequence[CasePair] = [
            pair for pair in pairs if self._lane_of[id(pair)] is lane and pair.is_doubted
        ]
        if not doubted or experiment.one_process:
            return
        lane.workers.discard()
        left = doubted
        while left:
            left = self._alone(experiment, experiment.base, left, partial(self._again, "base"))
        known = None, FailedInputs()  # the check's inputs are the same on both sides
        left = [pair for pair in doubted if pair.is_corrected and pair.base.failed not in known]
        for pair in left:  # until it is known
            pair.failure = f"{experiment.head.short_name} gave no result where base's is wrong"
        while left:
            left = self._alone(experiment, experiment.head, left, partial(self._again, "head"))

    def _control(self, experiment: ABExperiment, pairs: Sequence[CasePair]) -> None:
        """Measure bases where nothing of head runs, before their cases end as not slower.

        Head can't run beside base, but what it queued on a device can, and slow base down. Where
        processes have two speeds, some of base's may be slower by chance: as many run alone as make
        that unlikely.
        """
        ending = [pair for pair in pairs if self._ends_unless_slower(pair)]
        for count in range(1, MOST_ALONE + 1):
            if not ending or self._wrong:
                break
            self._alone(experiment, experiment.base, ending, self._time)
            for pair in ending:
                if len(pair.alone_us) < count:
                    pair.failure = f"{experiment.base.short_name} could not be measured alone"
                elif pair.is_slowed:
                    pair.failure = (
                        f"{experiment.base.short_name} is faster by more than {MAX_SLOWED:.0%} "
                        f"where nothing of {experiment.head.short_name} runs: no times are believed"
                    )
                if pair.failure:
                    pair.blocks.clear()
            ending = [pair for pair in ending if not pair.problem and pair.is_slowed is None]

    def _ends_unless_slower(self, pair: CasePair) -> bool:
        """Return True if a case needs no more pairs of processes, and is not slower."""
        if pair.problem or pair.alone_us:
            return False
        result = self._lane_of[id(pair)].experiment.result(pair)
        verdict = result.confirmation.verdict
        return verdict not in (Verdict.SLOWER, Verdict.NO_DATA) and self._rules.is_enough(result)

    def _affordable(self, pairs: Sequence[CasePair], rounds: int) -> list[CasePair]:
        """The first of these cases: as many as the budget allows to be in so many more pairs."""
        if self._deadline is None:
            return list(pairs)
        left_s = self._deadline - time.monotonic()
        count = len(pairs)
        while count > 1 and (self._durations.of(rounds, rounds * count) or 0.0) > left_s:
            count -= 1
        return list(pairs[:count])

    def _pairs_at_once(self, pairs: Sequence[CasePair], process: int, processes: int) -> int:
        """Number of pairs of processes to start together, up to so many `processes`.

        The first one chooses the configurations, before the others get ready. Those of a CPU would
        disturb each other.
        """
        experiment, gpus = self._lanes[0].experiment, max(pair.base.case.gpus for pair in pairs)
        if gpus > 1 or experiment.one_process or _is_on_cpu(experiment):
            return 1
        ends = [processes, *(p.processes for p in pairs if p.processes > process)]
        first = int(process == 0)
        left, most = min(ends) - process - first, min(_MOST_AT_ONCE, max(2, available_cpus() - 1))
        return first + (-(-left // -(-left // most)) if left else 0)

    def _spare_pairs(self, process: int, count: int, processes: int) -> int:
        """Number of pairs to start with the first ones, for cases that don't end before the look.

        process, count, processes: see _pairs_at_once.
        """
        whole = count > 1 and process == 0 and count == processes
        return max(0, min(self._rules.processes - processes, _MOST_AT_ONCE)) if whole else 0

    def _pairs_of_processes(
        self,
        lane: _Lane,
        pairs: Sequence[CasePair],
        process: int,
        count: int,
        spare: int,
        *,
        is_last: bool,
    ) -> Sequence[CasePair]:
        """Measure cases in `count` fresh pairs of processes; return those left if a process broke.

        spare: number of pairs besides, for cases that will need them. is_last: no other pair of
        processes follows, unless one of these breaks.
        """
        experiment, rules = lane.experiment, self._rules
        with ExitStack() as stack:
            began = time.monotonic()
            # Ends after the workers: a thread may wait for one of them.
            threads = stack.enter_context(ThreadPoolExecutor(count))
            workers = lane.workers.take(stack, count + spare)
            identities = [
                identity
                for both in threads.map(lambda each: experiment.identities(*each), workers)
                for identity in both
            ]
            for each in workers:
                for worker in each:
                    stack.callback(worker.finish)  # before any is waited for
            each_s = (time.monotonic() - began) / len(workers)
            self._durations.start_s += [each_s] * len(workers)
            # Those of older commits open the device as they start, whatever measures there.
            workers_wait = all(identity.get("waits_for_request", False) for identity in identities)
            if workers_wait and not is_last and self._starts_ahead(experiment):
                lane.workers.start_ahead()
            repeats = all(identity.get("repeats_contents", False) for identity in identities)
            side_by_side = all(identity.get("warms_when_used", False) for identity in identities)
            shares = all(identity.get("shares_weights", False) for identity in identities)
            holds = all(identity.get("holds_inputs", False) for identity in identities)
            learns = all(identity.get("takes_findings", False) for identity in identities)
            kernels = {identity.get("kernels", "") for identity in identities}
            same_kernels = len(kernels) == 1 and "" not in kernels
            alone = int(process == 0) if side_by_side else count

            def groups(pair: CasePair) -> Iterator[Sequence[Workers]]:
                yield from ([each] for each in workers[:alone])
                first = pair.blocks[0] if pair.blocks else None
                takes_spare = first is not None and is_far(first.base_us, first.head_us)
                yield workers[alone : len(workers) if takes_spare else count]

            for position, pair in enumerate(pairs):
                if self._is_over():
                    return ()
                for side in (pair.base, pair.head):
                    side.repeats, side.learns = repeats, learns
                pair.same_kernel = same_kernels and pair.base.case == pair.head.case
                pair.is_on_cpu = _is_on_cpu(experiment)
                began = time.monotonic()
                try:
                    for group in filter(None, groups(pair)):
                        measure_blocks(
                            pair,
                            group,
                            max(process, pair.processes),
                            placements=rules.placements,
                            blocks=rules.blocks,
                            on_block=partial(_report, experiment, pair.base.case),
                            side_by_side=side_by_side,
                            shares=shares,
                            holds=holds,
                            is_warm=time.monotonic() - self._measured_at < WARM_S,
                            idle=[w for each in workers if each not in group for w in each],
                        )
                        self._measured_at = time.monotonic()
                        if pair.problem:
                            break
                except RefusedError as error:
                    pair.failure = str(error)
                except WorkerError as error:
                    pair.failure = str(error)
                    return pairs[position + 1 :]
                case_s = (time.monotonic() - began) / max(1, pair.processes - process)
                self._durations.case_s += [case_s] * count
                self._show_progress()
        return ()

    def _alone(
        self,
        experiment: ABExperiment,
        side: Side,
        pairs: Sequence[CasePair],
        run: Callable[[ABExperiment, CasePair, WorkerProcess], None],
    ) -> Sequence[CasePair]:
        """Run cases in a process of one side beside which nothing of the other one runs.

        Return the remaining cases if the process broke.
        """
        with ExitStack() as stack:
            worker = experiment.worker(stack, side)
            worker.request_identity()
            worker.check_identity()
            for position, pair in enumerate(pairs):
                try:
                    run(experiment, pair, worker)
                except RefusedError:
                    continue
                except WorkerError:
                    return pairs[position + 1 :]
            worker.finish()
        return ()

    def _again(
        self, slot: str, experiment: ABExperiment, pair: CasePair, worker: WorkerProcess
    ) -> None:
        """Note whether a side is wrong on the inputs on which the other one, or base, was."""
        rules, failed = self._rules, pair.head.failed if pair.head.wrong else pair.base.failed
        side, placements = _unused_side(experiment, pair, slot), rules.processes * rules.placements
        if failed is None:
            run_alone(side, worker, placements=placements, blocks=rules.blocks)
        else:
            turns = 2 * rules.blocks
            run_again(side, worker, failed, placements=placements, turns=turns)
        if slot == "head":
            pair.failure = ""
            pair.head.note(side.wrong, failed, side.error)
            return
        pair.base_is_wrong = side.wrong != ""
        pair.base.wrong, pair.base.error = pair.base.wrong or side.wrong, side.error

    def _time(self, experiment: ABExperiment, pair: CasePair, worker: WorkerProcess) -> None:
        """Note the time of base in one placement."""
        side = _unused_side(experiment, pair, "base")
        times = run_alone(side, worker, placements=1, blocks=self._rules.blocks, is_brief=True)
        if times:
            pair.alone_us.append(statistics.fmean(times))

    def _starts_ahead(self, experiment: ABExperiment) -> bool:
        if experiment.starts_ahead is None:
            return can_start_beside(experiment.device)
        return experiment.starts_ahead

    def _expect(self, pair: CasePair, processes: int | None) -> None:
        """Note how many pairs of processes a case will probably take; None: it has ended."""
        self._expected[id(pair)] = processes
        self._show_progress()

    def _expected_of(self, pair: CasePair) -> int:
        return 0 if pair.problem else self._expected[id(pair)] or 0

    def _show_progress(self) -> None:
        if self._on_progress is None:
            return
        done = [pair.processes for pair in self._pairs]
        left = [max(self._expected_of(pair) - pair.processes, 0) for pair in self._pairs]
        left_s = self._durations.of(max(left), sum(left))
        if left_s is not None and self._deadline is not None:
            left_s = max(0.0, min(left_s, self._deadline - time.monotonic()))
        self._on_progress(
            ComparisonProgress(
                cases=len(self._pairs),
                decided=sum(expected is None for expected in self._expected.values()),
                pair=self._current,
                pairs=max(map(operator.add, done, left)),
                done=sum(done),
                expected=sum(done) + sum(left),
                left_s=left_s,
            )
        )


def is_far(base_us: float, head_us: float) -> bool:
    """Return True if a case won't end before a look, by the first block of its first pair."""
    return abs(math.log(head_us / base_us)) > _FAR


def _unused_side(experiment: ABExperiment, pair: CasePair, slot: str) -> CaseSide:
    """One side of a case for a process of its own, with what earlier ones chose."""
    known: CaseSide = getattr(pair, slot)
    unused: CaseSide = getattr(experiment.pair(pair.base.case, pair.head.case), slot)
    unused.config, unused.launches = known.config or {}, known.launches
    return unused


def _is_on_cpu(experiment: ABExperiment) -> bool:
    return experiment.device.startswith("cpu")


def _report(experiment: ABExperiment, case: Case, block: Block) -> None:
    if experiment.on_block is not None:
        experiment.on_block(case, block)

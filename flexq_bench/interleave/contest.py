"""From two sides and many cases to comparisons: looks, pairs of processes, and broken workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flexq_bench.errors import InfrastructureError
from flexq_bench.interleave.process import COMMAND, RefusedError, WorkerError, WorkerProcess
from flexq_bench.interleave.turns import Match, Side, play
from flexq_bench.interleave.values import (
    Block,
    CaseComparison,
    InterleaveRules,
    OnBlock,
    OnResult,
    judge,
)
from flexq_bench.regress import Comparison, confirm
from flexq_bench.regress.confirm import FEWEST_PLACEMENTS
from workloads.case import Case

# So many cases share the start of a pair of processes: a comparison that is interrupted loses them.
_TOGETHER = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Contender:
    """One side of a comparison: its name in results, and the folder whose code it runs.

    environment: its worker's; None: ours.
    """

    name: str
    tree: Path
    environment: Mapping[str, str] | None = None

    @property
    def short_name(self) -> str:
        """For messages: a commit by ten digits."""
        sha, dash, rest = self.name.partition("-")
        return sha[:10] + dash + rest if len(sha) >= 40 else self.name


def plain_match(base: Case, head: Case) -> Match:
    """A match whose workers are believed."""
    return Match(Side("base", base), Side("head", head))


@dataclass(frozen=True, slots=True)
class Contest:
    """Two sides that take turns, and how.

    one_process: both run in the same worker. command: what a worker is. match: who measures a pair
    of cases, base's and head's.
    """

    base: Contender
    head: Contender
    rules: InterleaveRules
    device: str
    seed: int = 0
    one_process: bool = False
    command: Sequence[str] = COMMAND
    on_result: OnResult | None = None
    on_block: OnBlock | None = None
    match: Callable[[Case, Case], Match] = plain_match

    def compare(self, pairs: Sequence[tuple[Case, Case]]) -> Iterator[CaseComparison]:
        """One result a pair of cases (base's and head's), those decided early first.

        Raises WorkerError if workers don't start at all, InfrastructureError if the two are not on
        one device or don't measure by one protocol.
        """
        matches: Sequence[Match] = [self.match(base, head) for base, head in pairs]
        for look in range(self.rules.looks):
            for start in range(0, len(matches), _TOGETHER):
                self._look(matches[start : start + _TOGETHER], look)
            results = [self._result(match) for match in matches]
            night = judge(results, self.rules)
            again = []
            for match, found, result in zip(matches, night, results, strict=True):
                decided = self.rules.is_decided(found.confirmation)
                if not decided and look + 1 < self.rules.looks:
                    again.append(match)
                    continue
                if self.on_result is not None:
                    self.on_result(result)
                yield result
            matches = again
            if matches:
                log.info("%d cases are not decided: another look", len(matches))

    def _look(self, matches: Sequence[Match], look: int) -> None:
        for process in self.rules.pairs_of(look):
            waiting: Sequence[Match] = [match for match in matches if not match.problem]
            while waiting:
                waiting = self._pair_of_processes(waiting, process)

    def _pair_of_processes(self, matches: Sequence[Match], process: int) -> Sequence[Match]:
        """Measure cases in fresh processes; those left where one broke."""
        with ExitStack() as stack:
            workers = self._start(stack)
            for position, match in enumerate(matches):
                try:
                    play(
                        match,
                        workers,
                        process,
                        placements=self.rules.placements,
                        blocks=self.rules.blocks,
                        on_block=partial(self._tell, match.base.case),
                    )
                except RefusedError as error:
                    match.failure = str(error)
                except WorkerError as error:
                    match.failure = str(error)
                    return matches[position + 1 :]
        return ()

    def _tell(self, case: Case, block: Block) -> None:
        if self.on_block is not None:
            self.on_block(case, block)

    def _start(self, stack: ExitStack) -> tuple[WorkerProcess, WorkerProcess]:
        base = self._worker(stack, self.base)
        head = base if self.one_process else self._worker(stack, self.head)
        first, second = base.check_identity(), head.check_identity()
        if first["device"] != second["device"]:
            raise InfrastructureError(
                f"the two don't share a device: {first['device']} and {second['device']}"
            )
        if first["protocol"] != second["protocol"]:
            raise InfrastructureError(
                f"{base.name} measures by protocol {first['protocol']} and {head.name} by "
                f"{second['protocol']}: their times don't compare"
            )
        return base, head

    def _worker(self, stack: ExitStack, contender: Contender) -> WorkerProcess:
        name = "the worker" if self.one_process else contender.short_name
        worker = WorkerProcess(
            name,
            contender.tree,
            device=self.device,
            seed=self.seed,
            timeout_s=self.rules.timeout_s,
            command=self.command,
            environment=contender.environment,
        )
        return stack.enter_context(worker)

    def _result(self, match: Match) -> CaseComparison:
        comparison = comparison_of(match, by_process=self.rules.processes >= FEWEST_PLACEMENTS)
        return CaseComparison(
            case=match.base.case,
            base=self.base.name,
            head=self.head.name,
            comparison=comparison,
            confirmation=confirm(comparison),
            base_binary=match.base.binary,
            head_binary=match.head.binary,
            base_config=match.base.config or {},
            head_config=match.head.config or {},
            detail=_detail(match, self.base.short_name, self.head.short_name),
        )


def comparison_of(match: Match, *, by_process: bool) -> Comparison:
    """The blocks of a case as the statistics want them.

    by_process: what shares an offset is a pair of processes; else a placement.
    """
    blocks = match.blocks
    placements = sorted({(block.process, block.placement) for block in blocks})
    labels = {at: at[0] if by_process else number for number, at in enumerate(placements)}
    base_mhz = tuple(block.base_mhz for block in blocks if block.base_mhz is not None)
    head_mhz = tuple(block.head_mhz for block in blocks if block.head_mhz is not None)
    told = len(base_mhz) == len(head_mhz) == len(blocks)
    base, head = match.base, match.head
    same_code = base.binary is not None and base.binary == head.binary
    return Comparison(
        base_us=tuple(block.base_us for block in blocks),
        head_us=tuple(block.head_us for block in blocks),
        placement=tuple(labels[block.process, block.placement] for block in blocks),
        base_mhz=base_mhz if told else None,
        head_mhz=head_mhz if told else None,
        correct=not (base.wrong or head.wrong),
        # Another configuration of the same code is other work.
        same_binary=same_code and base.config == head.config,
    )


def _detail(match: Match, base: str, head: str) -> str:
    if match.failure:
        return match.failure
    wrong = [f"{name}: {side.wrong}" for name, side in _named(match, base, head) if side.wrong]
    return "; ".join(wrong)


def _named(match: Match, base: str, head: str) -> tuple[tuple[str, Side], tuple[str, Side]]:
    return (base, match.base), (head, match.head)

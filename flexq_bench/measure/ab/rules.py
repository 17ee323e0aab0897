"""Rules of an A/B comparison: how much is measured in each look, and when that is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flexq_bench.errors import UsageError
from flexq_bench.verdicts import CaseComparison, Confirmation, Verdict, confirm_together
from flexq_bench.verdicts.alert_rule import (
    BEFORE_LOOK,
    BLOCKS,
    FALSE_DISCOVERY_RATE,
    FEWEST_BLOCKS,
    FEWEST_PLACEMENTS,
    LOOKS,
    MAX_CPU_WAIT,
    PAIRS_OF_PROCESSES,
    PLACEMENTS_A_PAIR,
    SURE_PLACEMENTS,
    is_decided,
    pairs_for_clear,
    verdict_of,
)

# Relative to those there are, the numbers of placements that are tried: up to 2,000 times as many.
_STEP, _MAX_STEPS = 1.1, 80


@dataclass(frozen=True, slots=True)
class InterleaveRules:
    """Number of measurements in one look (interim analysis) at a case, and number of looks.

    processes: fresh pairs of worker processes. Some kernels run at one of two speeds that is fixed
    when the process starts, so placements within one pair can't distinguish this from a change.
    placements: in each pair. blocks: ABBA blocks on each placement. looks: the largest number of
    looks; an ambiguous case gets another look, which doubles the blocks, and so does a slower or
    faster case with fewer than 12 placements, unless it is clear with fewer. timeout_s: for one
    reply of a worker; compiling and tuning take longest. suffices: returns True if the caller needs
    no more looks at a case; its second argument says whether the verdict is decided; None: a
    decided verdict suffices. budget_s: seconds after which no further case is measured; None: no
    limit. stops_at_wrong: if a case of head is wrong, no case is timed. Raises UsageError if a look
    would be too small to judge.
    """

    processes: int = PAIRS_OF_PROCESSES
    placements: int = PLACEMENTS_A_PAIR
    blocks: int = BLOCKS
    looks: int = LOOKS
    timeout_s: float = 600.0
    suffices: Suffices | None = None
    budget_s: float | None = None
    stops_at_wrong: bool = False

    def __post_init__(self) -> None:
        placements = self.processes * self.placements
        if placements < FEWEST_PLACEMENTS or placements * self.blocks < FEWEST_BLOCKS:
            raise UsageError(
                f"{self.processes} processes with {self.placements} placements of {self.blocks} "
                f"blocks are too few to judge: {FEWEST_BLOCKS} blocks over {FEWEST_PLACEMENTS} "
                "placements are needed"
            )
        if self.looks < 1 or self.timeout_s <= 0:
            raise UsageError("a comparison needs at least one look, and time for it")
        if self.budget_s is not None and self.budget_s <= 0:
            raise UsageError("a budget must be longer than 0 s")

    @classmethod
    def with_processes(cls, processes: int) -> InterleaveRules:
        """The default number of placements, spread over fewer or more pairs of processes."""
        if processes < 1:
            raise UsageError(f"a comparison needs at least one pair of processes, not {processes}")
        return cls(processes=processes, placements=-(-cls().processes // processes))

    @property
    def rate(self) -> float:
        """The share of one look in the false discoveries of a night."""
        return FALSE_DISCOVERY_RATE / self.looks

    @property
    def most_pairs(self) -> int:
        """Pairs of processes of a case after the last look."""
        return self.processes << (self.looks - 1)

    @property
    def stages(self) -> Mapping[int, bool]:
        """Pairs of processes after which cases are judged, increasing; True for those of a look.

        At the others, before each look, no case ends as slower or faster.
        """
        ends = [self.processes * 2**look for look in range(self.looks)]
        before = [math.ceil(BEFORE_LOOK * end) for end in ends]
        enough = [
            pairs
            for pairs in before
            if pairs * self._placements_a_pair >= FEWEST_PLACEMENTS
            and pairs * self.placements * self.blocks >= FEWEST_BLOCKS
        ]
        return {pairs: pairs in ends for pairs in sorted({*ends, *enough})}

    def pairs_for_clear(self, clear: int, compared: int, *, is_far: bool = False) -> int:
        """Pairs of processes with which a clear change is decided, one of `clear` of `compared`.

        Placements that share processes may all have the same speed by chance.
        """
        if self.processes < FEWEST_PLACEMENTS:
            return SURE_PLACEMENTS
        return pairs_for_clear(clear, compared, self.rate, is_far=is_far)

    def is_decided(
        self, confirmation: Confirmation, pairs_for_clear: int = SURE_PLACEMENTS
    ) -> bool:
        """Return True if more looks could not change the verdict.

        pairs_for_clear: number of placements with which a clear change is final.
        """
        enough = pairs_for_clear if confirmation.is_clear else SURE_PLACEMENTS
        return confirmation.limited_by_clocks or is_decided(
            confirmation.verdict, confirmation.placements, enough
        )

    def is_enough(self, result: CaseComparison, pairs_for_clear: int = SURE_PLACEMENTS) -> bool:
        """Return True if the caller needs no more looks."""
        sure = self.is_decided(result.confirmation, pairs_for_clear)
        if math.isnan(result.confirmation.log_ratio):  # no data, or incorrect
            return True
        return sure if self.suffices is None else self.suffices(result, sure)

    def pairs_needed(self, result: CaseComparison) -> int | None:
        """Estimate the pairs of processes with which a case that is not enough yet will be.

        None: not known, as without a mean, or because the caller asks another question of the
        blocks.
        """
        placements = self._placements_needed(result, result.confirmation.log_ratio)
        return None if placements is None else -(-placements // self._placements_a_pair)

    def is_hopeless(self, result: CaseComparison) -> bool:
        """Return True if all looks are unlikely to decide a case that is not enough yet.

        Not even a mean that is nearer to one of its bounds by half would do.
        """
        now = result.confirmation
        means = ((now.log_ratio + bound) / 2 for bound in (now.low, now.high))
        needed = [self._placements_needed(result, mean) for mean in (now.log_ratio, *means)]
        known = [placements for placements in needed if placements is not None]
        return bool(known) and min(known) > self.most_pairs * self._placements_a_pair

    @property
    def _placements_a_pair(self) -> int:
        """Units of the statistics in a pair of processes (see experiment.comparison_of)."""
        return self.placements if self.processes < FEWEST_PLACEMENTS else 1

    def _placements_needed(self, result: CaseComparison, mean: float) -> int | None:
        """Placements with which a case is enough if this is its mean.

        Bounds narrow with the square root of their number.
        """
        now = result.confirmation
        is_limited = result.comparison.cpu_wait > MAX_CPU_WAIT and not now.is_clear
        if not (math.isfinite(now.low) and math.isfinite(now.high)):
            return None
        for step in range(1, _MAX_STEPS + 1):
            placements = math.ceil(now.placements * _STEP**step)
            shrink = math.sqrt(now.placements / placements)
            low = mean - (now.log_ratio - now.low) * shrink
            high = mean + (now.high - now.log_ratio) * shrink
            verdict = verdict_of(mean, low, high, now.smallest_change)
            if is_limited and verdict in (Verdict.SLOWER, Verdict.FASTER):
                verdict = Verdict.AMBIGUOUS
            then = replace(
                now, verdict=verdict, log_ratio=mean, low=low, high=high, placements=placements
            )
            if self.is_enough(replace(result, confirmation=then)):
                return placements
        return None


Suffices = Callable[[CaseComparison, bool], bool]
OnResult = Callable[[CaseComparison], None]


@dataclass(frozen=True, slots=True)
class ComparisonProgress:
    """State of a comparison while it is measured.

    cases, decided: their numbers; those that ended undecided count as decided. pair: number of the
    current pair of processes. pairs: number of the last one, as expected now. done, expected: pairs
    of processes, summed over the cases. left_s: estimated seconds until the end; None: not known.
    """

    cases: int
    decided: int
    pair: int
    pairs: int
    done: int
    expected: int
    left_s: float | None

    @property
    def in_words(self) -> str:
        """Describe what is measured now, and how many cases are decided."""
        if not self.pair:
            return f"checking the results of {self.cases} cases"
        pairs = f"pair {self.pair} of {self.pairs}"
        return f"{self.decided} of {self.cases} cases decided, {pairs} of processes"


class ShownProgress(Protocol):
    """The part of a ComparisonProgress that is shown."""

    @property
    def done(self) -> int: ...

    @property
    def expected(self) -> int: ...

    @property
    def left_s(self) -> float | None: ...

    @property
    def in_words(self) -> str: ...


OnProgress = Callable[[ShownProgress], None]


def confirm_comparisons(
    results: Sequence[CaseComparison], rules: InterleaveRules | None = None
) -> tuple[CaseComparison, ...]:
    """Comparisons that are judged together, in the order given (see confirm_together)."""
    confirmations = confirm_together(
        [result.confirmation for result in results], rate=(rules or InterleaveRules()).rate
    )
    return tuple(
        replace(result, confirmation=confirmation)
        for result, confirmation in zip(results, confirmations, strict=True)
    )

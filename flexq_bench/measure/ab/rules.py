"""Rules of an A/B comparison: how much is measured in each look, and when that is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flexq_bench.errors import UsageError
from flexq_bench.verdicts import CaseComparison, Confirmation, confirm_together
from flexq_bench.verdicts.alert_rule import (
    BLOCKS,
    FALSE_DISCOVERY_RATE,
    FEWEST_BLOCKS,
    FEWEST_PLACEMENTS,
    LOOKS,
    PAIRS_OF_PROCESSES,
    PLACEMENTS_A_PAIR,
    SURE_PLACEMENTS,
    is_decided,
    pairs_for_clear,
)


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
    decided verdict suffices. Raises UsageError if a look would be too small to judge.
    """

    processes: int = PAIRS_OF_PROCESSES
    placements: int = PLACEMENTS_A_PAIR
    blocks: int = BLOCKS
    looks: int = LOOKS
    timeout_s: float = 600.0
    suffices: Suffices | None = None

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
    def blocks_at_first(self) -> int:
        return self.processes * self.placements * self.blocks

    def pairs_of(self, look: int) -> range:
        """Numbers of the pairs of processes that a look adds; the first look is 0."""
        return range(self.processes * 2**look // 2 if look else 0, self.processes * 2**look)

    def pairs_for_clear(self, clear: int, compared: int) -> int:
        """Pairs of processes with which `clear` clear changes of `compared` cases are decided.

        Placements that share processes may all have the same speed by chance.
        """
        if not clear or self.processes < FEWEST_PLACEMENTS:
            return SURE_PLACEMENTS
        return pairs_for_clear(clear, compared, self.rate)

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


Suffices = Callable[[CaseComparison, bool], bool]
OnResult = Callable[[CaseComparison], None]


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

"""A case of two commits, or of two kernels, compared on one device: the input of verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flexq_bench.verdicts.alert_rule import LOOKS, MAX_CPU_WAIT, PAIRS_OF_PROCESSES
from flexq_bench.verdicts.confirmation import Comparison, Confirmation
from flexq_bench.verdicts.verdict import Verdict
from flexq_bench.workloads.case import Case

_MOST_PROCESSES = 100  # that --processes takes


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """Two sides of one case.

    base, head: full commit ids (with "-dirty" for a working tree with changes), or kernel labels;
    the case is then the base's. comparison has tuples of floats, so that it can be stored and
    judged again. confirmation: of this case alone. base_binary, head_binary: hash of the machine
    code; None: a library's. detail: why there is no data, or what is wrong; empty: no problem.
    pairs_needed: estimated pairs of processes that would decide it; None: it is decided, or not
    known. sandbox: kind of sandbox that head's processes ran in, "none", or empty: they did not
    run.
    """

    case: Case
    base: str
    head: str
    comparison: Comparison
    confirmation: Confirmation
    base_binary: str | None = None
    head_binary: str | None = None
    base_config: dict[str, Any] = field(default_factory=dict)
    head_config: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    pairs_needed: int | None = None
    sandbox: str = ""

    @property
    def is_changed(self) -> bool:
        """Return True if it is slower or faster."""
        return self.confirmation.verdict in (Verdict.SLOWER, Verdict.FASTER)

    @property
    def is_clear(self) -> bool:
        """Return True if it is slower or faster beyond doubt; see Confirmation."""
        return self.is_changed and self.confirmation.is_clear

    @property
    def is_far(self) -> bool:
        """Return True if the sides are far apart; see Confirmation."""
        return self.confirmation.is_far

    @property
    def need(self) -> str:
        """Describe what would decide an ambiguous case; empty: not known."""
        needs = []
        if self.pairs_needed is not None:
            need = f"about {self.pairs_needed} pairs of processes would decide it"
            processes = math.ceil(self.pairs_needed / 2 ** (LOOKS - 1))
            allows_as_many = PAIRS_OF_PROCESSES < processes <= _MOST_PROCESSES
            needs.append(f"{need} (--processes {processes})" if allows_as_many else need)
        if self.comparison.cpu_wait > MAX_CPU_WAIT:
            needs.append(
                f"its processes waited for a CPU in {self.comparison.cpu_wait:.0%} of the time: "
                "measure it where less else runs"
            )
        return "; ".join(needs)


Comparer = Callable[[Sequence[Case]], Iterator[CaseComparison]]

"""False alerts and power of the two-stage rule and of simple rules, on simulated nights.

Prints the tables that docs/statistics.md quotes, from fixed seeds; --looks limits the number of
looks, to show the loss of power:
    python benchmarks/verdicts/simulate.py [--looks 2] [--processes 1]
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from in_processes import in_processes
from noise import KINDS, PROCESS_SIGMA, PROCESSES, SIGMA, Floats, comparison, nightly
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from rules import LONGEST, SIMPLE

from flexq_bench.db.queries.series import BASE_LAG_COMMITS
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.measure.ab.course import is_far
from flexq_bench.measure.ab.looks import look_by_look
from flexq_bench.verdicts import (
    CaseComparison,
    Comparison,
    Confirmation,
    Verdict,
    confirm,
    confirm_together,
    trigger,
)
from flexq_bench.verdicts.alert_rule import HISTORY_RESULTS
from flexq_bench.verdicts.history_trigger import trigger_many
from flexq_bench.workloads.case import Case

SERIES = 500
NULL_NIGHTS = 100
POWER_NIGHTS = 5
ALERTS = (Verdict.SLOWER, Verdict.FASTER)

_CASE = Case.from_key("empty gemm cold m1n1k1")  # cases differ by their place in the night only


@dataclass
class Candidate:
    """A case with all blocks that its looks could measure, [blocks].

    pair: of processes, of each block. mhz: [2, blocks] SM clocks of base and head; None: equal.
    pairs: number of pairs measured so far.
    """

    base_us: Floats
    head_us: Floats
    pair: NDArray[np.int64]
    mhz: Floats | None = None
    cpu_wait: float = 0.0
    pairs: int = 0
    _confirmed: dict[int, CaseComparison] = field(default_factory=dict)

    def judge(self) -> CaseComparison:
        """The verdict on this case alone, by what was measured so far."""
        if self.pairs not in self._confirmed:
            now = self.pair < self.pairs
            base, head = (None, None) if self.mhz is None else self.mhz[:, now]
            times = self.base_us[now], self.head_us[now], self.pair[now]
            blocks = Comparison(*times, base, head, cpu_wait=self.cpu_wait)
            self._confirmed[self.pairs] = CaseComparison(
                _CASE, "base", "head", blocks, confirm(blocks)
            )
        return self._confirmed[self.pairs]


def most_pairs(rules: InterleaveRules) -> int:
    """Pairs of processes after the last look."""
    return rules.most_pairs


def candidate_of(
    kind: str, rng: np.random.Generator, shift: float, process_sigma: float, rules: InterleaveRules
) -> Candidate:
    """A case whose head is slower by `shift` (ln); see noise.comparison."""
    pairs = most_pairs(rules)
    return Candidate(*comparison(kind, rng, shift=shift, pairs=pairs, process_sigma=process_sigma))


def decide(
    night: list[Candidate], rules: InterleaveRules, *, spares: bool = False
) -> list[tuple[Confirmation, int]]:
    """Return the verdict on each candidate of a night, and the pairs of processes that it took.

    The looks are those of an A/B experiment; then all are judged together, as verdicts are stored.
    spares: as on a GPU, candidates that are far off in their first pair take those of the first
    look at once.
    """

    def measure(candidates: Sequence[Candidate], pairs: int) -> None:
        for candidate in candidates:
            takes_spare = spares and is_far(candidate.base_us[0], candidate.head_us[0])
            candidate.pairs = max(candidate.pairs, pairs, rules.processes if takes_spare else 0)

    for _ in look_by_look(night, rules, measure, Candidate.judge):
        pass
    together = confirm_together(
        [candidate.judge().confirmation for candidate in night], rate=rules.rate
    )
    return [(verdict, candidate.pairs) for verdict, candidate in zip(together, night, strict=True)]


def quiet_nights(
    kind: str, rng: np.random.Generator, process_sigma: float, rules: InterleaveRules
) -> tuple[float, float, float, list[list[Candidate]]]:
    """False alerts a 1,000 series-nights, share of candidates, pairs of processes that one takes,
    and the nights themselves."""
    logs = nightly(kind, rng, SERIES, HISTORY_RESULTS + NULL_NIGHTS)
    windows = sliding_window_view(logs[:, :-1], HISTORY_RESULTS, axis=1)
    _, _, candidate = trigger_many(windows, logs[:, HISTORY_RESULTS:])
    nights = [
        [candidate_of(kind, rng, 0.0, process_sigma, rules) for _ in range(int(count))]
        for count in candidate.sum(axis=0)
    ]
    decided = [verdict for night in nights for verdict in decide(night, rules)]
    false = sum(confirmation.verdict in ALERTS for confirmation, _ in decided)
    pairs = float(np.mean([taken for _, taken in decided]))
    return 1000 * false / candidate.size, float(candidate.mean()), pairs, nights


def power(
    kind: str,
    rng: np.random.Generator,
    step: float,
    nights: int,
    process_sigma: float,
    quiet: list[list[Candidate]],
    rules: InterleaveRules,
) -> float:
    """Share of series whose step alerts within `nights`; each stands alone among quiet ones.

    A candidate is compared with the last commit that was trusted before the step.
    """
    shift = float(np.log1p(step))
    logs = nightly(kind, rng, SERIES, HISTORY_RESULTS + nights)
    logs[:, HISTORY_RESULTS:] += shift
    windows = sliding_window_view(logs[:, :-1], HISTORY_RESULTS, axis=1)
    _, _, candidate = trigger_many(windows, logs[:, HISTORY_RESULTS:])
    detected = 0
    for row in candidate:
        for _ in range(int(row.sum())):
            others = quiet[int(rng.integers(len(quiet)))]
            suspect = candidate_of(kind, rng, shift, process_sigma, rules)
            if decide([suspect, *others], rules)[0][0].verdict in ALERTS:
                detected += 1
                break
    return detected / SERIES


def young(
    first: int, step: float, rng: np.random.Generator, sigma: float, rules: InterleaveRules
) -> float:
    """Share of series whose step at the night `first` of an epoch alerts within 5 nights.

    A candidate is compared with the commit 5 before it, or with the epoch's first, alone.
    """
    shift, detected = float(np.log1p(step)), 0
    logs = sigma * rng.standard_normal((SERIES, first - 1 + POWER_NIGHTS))
    logs[:, first - 1 :] += shift
    for row in np.exp(logs):
        for night in range(first, row.size + 1):
            looked = trigger(row[: night - 1], float(row[night - 1]))
            if looked.verdict is not Verdict.CANDIDATE:
                continue
            left = shift if max(night - BASE_LAG_COMMITS, 1) < first else 0.0
            suspect = candidate_of("Gaussian", rng, left, PROCESS_SIGMA, rules)
            if decide([suspect], rules)[0][0].verdict in ALERTS:
                detected += 1
                break
    return detected / SERIES


def simple(rule: str, kind: str, rng: np.random.Generator) -> tuple[float, float, float]:
    """False alerts a 1,000 series-nights, power at 2 % in 5 nights, at 5 % in 1 night."""
    judged = SIMPLE[rule]

    def alerting(shift: float, nights: int) -> np.ndarray:
        logs = nightly(kind, rng, SERIES, LONGEST + nights)
        logs[:, LONGEST:] += shift
        return judged(sliding_window_view(logs[:, :-1], LONGEST, axis=1), logs[:, LONGEST:])

    false = 1000 * float(alerting(0.0, NULL_NIGHTS).mean())
    at_two = float(alerting(float(np.log1p(0.02)), POWER_NIGHTS).any(axis=1).mean())
    at_five = float(alerting(float(np.log1p(0.05)), 1).any(axis=1).mean())
    return false, at_two, at_five


def generator(*names: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def two_stage(
    kind: str, process_sigma: float, rules: InterleaveRules
) -> tuple[float, float, float, float, float]:
    """Return the results of `simple`, the share of candidates, and pairs of processes of one."""
    rng = generator(kind, process_sigma)
    false, candidates, pairs, quiet = quiet_nights(kind, rng, process_sigma, rules)
    at_two = power(kind, rng, 0.02, POWER_NIGHTS, process_sigma, quiet, rules)
    at_five = power(kind, rng, 0.05, 1, process_sigma, quiet, rules)
    return false, at_two, at_five, candidates, pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=InterleaveRules().looks)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    # What `nightly`, `gate perf` and `compare` do.
    rules = InterleaveRules(looks=arguments.looks)
    out = sys.stdout.write
    out("| rule | noise | false alerts / 1,000 | 2 % in 5 nights | 5 % in 1 night | candidates |")
    out(" pairs |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |\n")
    todo = [(kind, sigma) for sigma in (PROCESS_SIGMA, SIGMA) for kind in (*KINDS, *PROCESSES)]
    rows = in_processes(two_stage, [(*task, rules) for task in todo], arguments.processes)
    for (kind, sigma), (false, at_two, at_five, candidates, pairs) in zip(todo, rows, strict=True):
        out(f"| two-stage, process σ {sigma:.1%} | {kind} | {false:.2f} | {at_two:.1%} | ")
        out(f"{at_five:.1%} | {candidates:.1%} | {pairs:.0f} |\n")
        sys.stdout.flush()
    for rule in SIMPLE:
        for kind in KINDS:
            false, at_two, at_five = simple(rule, kind, generator(rule, kind))
            out(f"| {rule} | {kind} | {false:.2f} | {at_two:.1%} | {at_five:.1%} | | |\n")
    out("\n| step at the night of an epoch | σ 0.3 %: 2 % | 5 % | σ 1 %: 2 % | 5 % |\n")
    out("| --- | ---: | ---: | ---: | ---: |\n")
    for first in (2, 3, 4, 6):
        out(f"| {first} |")
        for sigma in (0.003, SIGMA):
            for step in (0.02, 0.05):
                rng = generator("young", first, step, sigma)
                out(f" {young(first, step, rng, sigma, rules):.1%} |")
        out("\n")


if __name__ == "__main__":
    main()

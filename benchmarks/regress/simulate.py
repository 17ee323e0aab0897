"""False alerts and power of the two-stage rule and of simple rules, on simulated nights.

Prints the tables that docs/regress.md quotes, from fixed seeds:
    python benchmarks/regress/simulate.py
"""

from __future__ import annotations

import sys
import zlib

import numpy as np
from noise import KINDS, PROCESS_SIGMA, PROCESSES, SIGMA, comparison, nightly
from numpy.lib.stride_tricks import sliding_window_view
from rules import LONGEST, SIMPLE

from flexq_bench.interleave import InterleaveRules
from flexq_bench.regress import Comparison, Confirmation, Verdict, confirm, confirm_night
from flexq_bench.regress.trigger import WINDOW, judge

SERIES = 500
NULL_NIGHTS = 100
POWER_NIGHTS = 5
RULES = InterleaveRules()  # of `nightly`, `gate perf` and `compare`
PAIRS = tuple(RULES.pairs_of(look).stop for look in range(RULES.looks))  # of processes
ALERTS = (Verdict.SLOWER, Verdict.FASTER)

Looks = list[Confirmation]  # of one candidate; each look knows what those before it measured


def looks_at(kind: str, rng: np.random.Generator, shift: float, process_sigma: float) -> Looks:
    base, head, pair = comparison(
        kind, rng, shift=shift, pairs=PAIRS[-1], process_sigma=process_sigma
    )
    looks = [confirm(Comparison(base, head, pair))]
    for pairs in PAIRS[-2::-1]:
        known = pair < pairs
        looks.insert(0, confirm(Comparison(base[known], head[known], pair[known])))
    return looks


def alerts(night: list[Looks]) -> list[bool]:
    """Which candidates of a night alert: each by the first look that decides it, or the last."""
    decided: dict[int, Verdict] = {}
    for look in range(len(PAIRS)):
        judged = confirm_night([looks[look] for looks in night], rate=RULES.rate)
        for candidate, found in enumerate(judged):
            if RULES.is_decided(found) or look + 1 == len(PAIRS):
                decided.setdefault(candidate, found.verdict)
    return [decided[candidate] in ALERTS for candidate in range(len(night))]


def quiet_nights(
    kind: str, rng: np.random.Generator, process_sigma: float
) -> tuple[float, float, list[list[Looks]]]:
    """False alerts a 1,000 series-nights, share of candidates, and the nights themselves."""
    logs = nightly(kind, rng, SERIES, WINDOW + NULL_NIGHTS)
    windows = sliding_window_view(logs[:, :-1], WINDOW, axis=1)
    _, _, candidate = judge(windows, logs[:, WINDOW:])
    nights = [
        [looks_at(kind, rng, 0.0, process_sigma) for _ in range(int(count))]
        for count in candidate.sum(axis=0)
    ]
    false = sum(sum(alerts(night)) for night in nights)
    return 1000 * false / candidate.size, float(candidate.mean()), nights


def power(
    kind: str,
    rng: np.random.Generator,
    step: float,
    nights: int,
    process_sigma: float,
    quiet: list[list[Looks]],
) -> float:
    """Share of series whose step alerts within `nights`; each stands alone among quiet ones.

    A candidate is compared with the last commit that was trusted before the step.
    """
    shift = float(np.log1p(step))
    logs = nightly(kind, rng, SERIES, WINDOW + nights)
    logs[:, WINDOW:] += shift
    windows = sliding_window_view(logs[:, :-1], WINDOW, axis=1)
    _, _, candidate = judge(windows, logs[:, WINDOW:])
    found = 0
    for row in candidate:
        for _ in range(int(row.sum())):
            others = quiet[int(rng.integers(len(quiet)))]
            if alerts([looks_at(kind, rng, shift, process_sigma), *others])[0]:
                found += 1
                break
    return found / SERIES


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


def two_stage(kind: str, process_sigma: float) -> tuple[float, float, float, float]:
    """As `simple`, and the share of candidates last."""
    rng = generator(kind, process_sigma)
    false, candidates, quiet = quiet_nights(kind, rng, process_sigma)
    at_two = power(kind, rng, 0.02, POWER_NIGHTS, process_sigma, quiet)
    at_five = power(kind, rng, 0.05, 1, process_sigma, quiet)
    return false, at_two, at_five, candidates


def main() -> None:
    out = sys.stdout.write
    out("| rule | noise | false alerts / 1,000 | 2 % in 5 nights | 5 % in 1 night | candidates |\n")
    out("| --- | --- | ---: | ---: | ---: | ---: |\n")
    for sigma in (PROCESS_SIGMA, SIGMA):
        for kind in (*KINDS, *PROCESSES):
            false, at_two, at_five, candidates = two_stage(kind, sigma)
            out(f"| two-stage, process σ {sigma:.1%} | {kind} | {false:.2f} | {at_two:.1%} | ")
            out(f"{at_five:.1%} | {candidates:.1%} |\n")
            sys.stdout.flush()
    for rule in SIMPLE:
        for kind in KINDS:
            false, at_two, at_five = simple(rule, kind, generator(rule, kind))
            out(f"| {rule} | {kind} | {false:.2f} | {at_two:.1%} | {at_five:.1%} | |\n")


if __name__ == "__main__":
    main()

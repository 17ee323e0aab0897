"""False alerts and power of the two-stage rule and of simple rules, on simulated nights.

Prints the tables that docs/regress.md quotes, from fixed seeds:
    python benchmarks/regress/simulate.py
"""

from __future__ import annotations

import sys
import zlib
from dataclasses import dataclass

import numpy as np
from noise import KINDS, PROCESS_SIGMA, SIGMA, comparison, nightly
from numpy.lib.stride_tricks import sliding_window_view
from rules import LONGEST, RULES

from flexq_bench.regress import Comparison, Confirmation, Verdict, confirm, confirm_night
from flexq_bench.regress.confirm import FALSE_DISCOVERY_RATE
from flexq_bench.regress.trigger import WINDOW, judge

SERIES = 500
NULL_NIGHTS = 100
POWER_NIGHTS = 5
PAIRS = (12, 24)  # of processes; the second look is taken where the first is ambiguous
LOOKS_RATE = FALSE_DISCOVERY_RATE / len(PAIRS)  # two looks share the night's false discoveries
ALERTS = (Verdict.SLOWER, Verdict.FASTER)


@dataclass(frozen=True)
class Two:
    """Both looks of one candidate."""

    first: Confirmation
    second: Confirmation


def look(kind: str, rng: np.random.Generator, shift: float, process_sigma: float) -> Two:
    def judged(pairs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return comparison(kind, rng, shift=shift, pairs=pairs, process_sigma=process_sigma)

    base, head, pair = judged(PAIRS[0])
    first = confirm(Comparison(base, head, pair))
    if first.verdict is Verdict.SAME:
        return Two(first, first)
    more_base, more_head, more_pair = judged(PAIRS[1] - PAIRS[0])
    return Two(
        first,
        confirm(
            Comparison(
                np.concatenate([base, more_base]),
                np.concatenate([head, more_head]),
                np.concatenate([pair, more_pair + PAIRS[0]]),
            )
        ),
    )


def alerts(night: list[Two]) -> list[bool]:
    """Which candidates of a night alert, at the first look or at the second."""
    first = confirm_night([two.first for two in night], rate=LOOKS_RATE)
    second = confirm_night([two.second for two in night], rate=LOOKS_RATE)
    return [
        a.verdict in ALERTS or (a.verdict is Verdict.AMBIGUOUS and b.verdict in ALERTS)
        for a, b in zip(first, second, strict=True)
    ]


def quiet_nights(
    kind: str, rng: np.random.Generator, process_sigma: float
) -> tuple[float, float, list[list[Two]]]:
    """False alerts a 1,000 series-nights, share of candidates, and the nights themselves."""
    logs = nightly(kind, rng, SERIES, WINDOW + NULL_NIGHTS)
    windows = sliding_window_view(logs[:, :-1], WINDOW, axis=1)
    _, _, candidate = judge(windows, logs[:, WINDOW:])
    nights = [
        [look(kind, rng, 0.0, process_sigma) for _ in range(int(count))]
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
    quiet: list[list[Two]],
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
            if alerts([look(kind, rng, shift, process_sigma), *others])[0]:
                found += 1
                break
    return found / SERIES


def simple(rule: str, kind: str, rng: np.random.Generator) -> tuple[float, float, float]:
    """False alerts a 1,000 series-nights, power at 2 % in 5 nights, at 5 % in 1 night."""
    judged = RULES[rule]

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
        for kind in KINDS:
            false, at_two, at_five, candidates = two_stage(kind, sigma)
            out(f"| two-stage, process σ {sigma:.1%} | {kind} | {false:.2f} | {at_two:.1%} | ")
            out(f"{at_five:.1%} | {candidates:.1%} |\n")
            sys.stdout.flush()
    for rule in RULES:
        for kind in KINDS:
            false, at_two, at_five = simple(rule, kind, generator(rule, kind))
            out(f"| {rule} | {kind} | {false:.2f} | {at_two:.1%} | {at_five:.1%} | |\n")


if __name__ == "__main__":
    main()

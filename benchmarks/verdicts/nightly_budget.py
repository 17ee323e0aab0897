"""The nightly trigger under its budget: 1,194 series, 14 % of them with two speeds 12 % apart.

One series has a step; by evidence (`verdicts.budget`) and, beside it, by the size of the change:
    python benchmarks/verdicts/nightly_budget.py
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

from flexq_bench.verdicts import Comparison, Verdict, confirm, trigger
from flexq_bench.verdicts.alert_rule import HISTORY_RESULTS
from flexq_bench.verdicts.budget import Surprise, ranked, surprise

Floats = NDArray[np.float64]
SERIES, TWO_SPEEDS, GAP, SIGMA = 1194, 0.14, 0.115, 0.003
BUDGET = 50
FAMILIES = 12
TRIALS = 30
PAIRS, BLOCKS = 12, 2  # of a comparison: pairs of processes, blocks on each


def nights(rng: np.random.Generator, count: int) -> Floats:
    logs = SIGMA * rng.standard_normal((SERIES, count))
    two = np.arange(SERIES) < TWO_SPEEDS * SERIES
    logs += GAP * (rng.random(logs.shape) < 0.5) * two[:, None]
    return logs


def order(logs: Floats, families: NDArray[np.int64], *, by_size: bool) -> list[int]:
    values = np.exp(logs)
    looked = [trigger(row[:-1], float(row[-1])) for row in values]
    chosen = [one.verdict is Verdict.CANDIDATE for one in looked]
    if by_size:
        return sorted(np.flatnonzero(chosen).tolist(), key=lambda at: -abs(looked[at].log_change))
    surprises = [
        Surprise(surprise(row[:-1], float(row[-1])), int(family), is_candidate=bool(candidate))
        for row, family, candidate in zip(values, families, chosen, strict=True)
    ]
    return ranked(surprises)


def is_confirmed(rng: np.random.Generator, shift: float, *, two_speeds: bool) -> bool:
    offsets = SIGMA * rng.standard_normal((2, PAIRS))
    offsets += GAP * (rng.random((2, PAIRS)) < 0.5) * two_speeds
    offsets[1] += shift
    blocks = np.repeat(offsets, BLOCKS, axis=1) + 0.002 * rng.standard_normal((2, BLOCKS * PAIRS))
    base, head = np.exp(blocks)
    found = confirm(Comparison(base, head, np.repeat(np.arange(PAIRS), BLOCKS)))
    return found.verdict in (Verdict.SLOWER, Verdict.FASTER)


def found_within(
    rng: np.random.Generator, step: float, most: int, *, two_speeds: bool, by_size: bool
) -> tuple[bool, int]:
    """Whether a step is compared and confirmed in so many nights; candidates of the first."""
    shift = float(np.log1p(step))
    logs = nights(rng, HISTORY_RESULTS + most)
    target = 0 if two_speeds else SERIES - 1
    logs[target, HISTORY_RESULTS:] += shift
    families = rng.integers(FAMILIES, size=SERIES)
    candidates = 0
    for night in range(most):
        first = order(logs[:, night : HISTORY_RESULTS + night + 1], families, by_size=by_size)
        candidates = candidates or len(first)
        if target in first[:BUDGET] and is_confirmed(rng, shift, two_speeds=two_speeds):
            return True, candidates
    return False, candidates


def main() -> None:
    out = sys.stdout.write
    out("| series | nights | order | candidates a night | compared | 2 % | 3 % | 5 % |\n")
    out("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |\n")
    for two_speeds, most in ((False, 1), (True, 5)):
        for by_size in (True, False):
            name, way = (
                ("two speeds" if two_speeds else "quiet"),
                ("size" if by_size else "evidence"),
            )
            shares, counts = [], []
            for step in (0.02, 0.03, 0.05):
                rng = np.random.default_rng(round(1000 * step) + most)
                trials = [
                    found_within(rng, step, most, two_speeds=two_speeds, by_size=by_size)
                    for _ in range(TRIALS)
                ]
                shares.append(f"{np.mean([one for one, _ in trials]):.0%}")
                counts += [count for _, count in trials]
            out(f"| {name} | {most} | {way} | {np.mean(counts):.0f} | {BUDGET} | ")
            out(" | ".join(shares) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

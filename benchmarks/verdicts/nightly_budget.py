"""The nightly trigger under its budget: 1,194 series, 14 % of them with two speeds 12 % apart.

One series, or several of a family, have a step. Candidates are ranked by evidence
(`verdicts.budget`) and, for comparison, by the size of the change:
    python benchmarks/verdicts/nightly_budget.py [--processes 1] [--trials 60] [--slowed NAME]
"""

from __future__ import annotations

import argparse
import sys
import zlib

import numpy as np
from in_processes import in_processes
from numpy.typing import NDArray
from simulate import Candidate, decide, most_pairs

from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import Verdict, trigger
from flexq_bench.verdicts.alert_rule import HISTORY_RESULTS
from flexq_bench.verdicts.budget import Surprise, ranked, surprise

Floats = NDArray[np.float64]
SERIES, TWO_SPEEDS_SHARE, GAP, SIGMA = 1194, 0.14, 0.115, 0.003
MAX_COMPARISONS = 50
FAMILIES = 12
TRIALS = 60
STEPS = (0.01, 0.02, 0.03, 0.05)
BLOCKS_PER_PROCESS = 2
RULES = InterleaveRules()
PAIR_S = 20.0  # H200: 8 to 12 s a process, nearly all of it its start


def nights(rng: np.random.Generator, count: int) -> Floats:
    logs = SIGMA * rng.standard_normal((SERIES, count))
    two = np.arange(SERIES) < TWO_SPEEDS_SHARE * SERIES
    logs += GAP * (rng.random(logs.shape) < 0.5) * two[:, None]
    return logs


def order(logs: Floats, families: NDArray[np.int64], *, by_size: bool) -> list[int]:
    values = np.exp(logs)
    results = [trigger(row[:-1], float(row[-1])) for row in values]
    chosen = [result.verdict is Verdict.CANDIDATE for result in results]
    if by_size:
        return sorted(
            np.flatnonzero(chosen).tolist(), key=lambda index: -abs(results[index].log_change)
        )
    surprises = [
        Surprise(surprise(row[:-1], float(row[-1])), int(family), is_candidate=bool(candidate))
        for row, family, candidate in zip(values, families, chosen, strict=True)
    ]
    return ranked(surprises)


def confirmed(rng: np.random.Generator, shift: float, *, two_speeds: bool) -> tuple[bool, int]:
    """Return whether a simulated comparison is slower or faster, and its pairs of processes."""
    most = most_pairs(RULES)
    offsets = SIGMA * rng.standard_normal((2, most))
    offsets += GAP * (rng.random(offsets.shape) < 0.5) * two_speeds
    offsets[1] += shift
    scatter = 0.002 * rng.standard_normal((2, BLOCKS_PER_PROCESS * most))
    base, head = np.exp(np.repeat(offsets, BLOCKS_PER_PROCESS, axis=1) + scatter)
    pair = np.repeat(np.arange(most), BLOCKS_PER_PROCESS)
    ((confirmation, pairs),) = decide([Candidate(base, head, pair)], RULES)
    return confirmation.verdict in (Verdict.SLOWER, Verdict.FASTER), pairs


def trial(
    number: int, step: float, most: int, slowed: int, two_speeds: bool, by_size: bool
) -> tuple[bool, int, float]:
    """Return whether a step is found within `most` nights in one of the series that have it.

    `slowed` series of one family have the step. Also returns the candidates of the
    first night, and the mean number of pairs of processes in comparisons of other series.
    """
    rng = np.random.default_rng(
        zlib.crc32(f"{number} {step} {most} {slowed} {two_speeds}".encode())
    )
    shift = float(np.log1p(step))
    logs = nights(rng, HISTORY_RESULTS + most)
    families = rng.integers(FAMILIES, size=SERIES)
    is_two = np.arange(SERIES) < TWO_SPEEDS_SHARE * SERIES
    able = np.flatnonzero((is_two == two_speeds) & (families == 0))
    targets = able[:slowed]
    logs[targets, HISTORY_RESULTS:] += shift
    candidates, is_any_found = 0, False
    innocents: list[int] = []
    for night in range(most):
        first = order(logs[:, night : HISTORY_RESULTS + night + 1], families, by_size=by_size)
        candidates = candidates or len(first)
        for index in first[:MAX_COMPARISONS]:
            is_slowed = bool(np.isin(index, targets))
            if not is_slowed and night:
                continue
            is_found, pairs = confirmed(rng, shift * is_slowed, two_speeds=bool(is_two[index]))
            is_any_found |= is_slowed and is_found
            if not is_slowed:
                innocents.append(pairs)
        if is_any_found:
            break
    return is_any_found, candidates, float(np.mean(innocents))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--slowed", default="", help="only rows whose first column has this text")
    options = parser.parse_args()
    out = sys.stdout.write
    out(
        "| slowed | nights | order | candidates a night | compared | pairs of processes | GPU min |"
    )
    out(" 1 % | 2 % | 3 % | 5 % |\n| --- | ---: | --- |" + " ---: |" * 8 + "\n")
    rows = [
        ("one quiet series", 1, 1, False),
        ("one quiet series", 5, 1, False),
        ("ten quiet ones of a family", 5, 10, False),
        ("one of two speeds", 5, 1, True),
    ]
    for name, most, slowed, two_speeds in (row for row in rows if options.slowed in row[0]):
        for by_size in (True, False) if most == 1 else (False,):
            todo = [
                (number, step, most, slowed, two_speeds, by_size)
                for step in STEPS
                for number in range(options.trials)
            ]
            is_found, counts, pairs = np.array(list(in_processes(trial, todo, options.processes))).T
            shares = is_found.reshape(len(STEPS), options.trials).mean(axis=1)
            compared = min(MAX_COMPARISONS, counts.mean())
            taken = compared * pairs.mean()
            way = "size" if by_size else "evidence"
            out(f"| {name} | {most} | {way} | {counts.mean():.0f} | {compared:.0f} | {taken:.0f} |")
            out(f" {taken * PAIR_S / 60:.0f} | ")
            out(" | ".join(f"{share:.0%}" for share in shares) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Kernels that run at one of several speeds, each for several nights: no switch is a step.

Prints the table that docs/statistics.md quotes, from fixed seeds:
    python benchmarks/verdicts/several_speeds.py [--series 40] [--held-out] [--kind NOISE ...]
"""

from __future__ import annotations

import argparse
import sys
import zlib
from functools import partial

import numpy as np
from in_processes import in_processes
from retrospective import (
    HISTORY,
    MAX_DISTANCE,
    NIGHTS,
    SIGMA,
    Draw,
    Floats,
    detected,
    stored_and_kept,
    with_memory,
)
from retrospective import KINDS as ONE_SPEED

STEP_AT, SERIES_LENGTH = 150, 300
STEPS = (0.02, 0.05)
GAPS = (3.0, 15.0)  # of neighbouring speeds, in sigma
VISITS = (3.0, 15.0)  # mean nights
SERIES_PER_TASK = 5


def _log_uniform(rng: np.random.Generator, ends: tuple[float, float], size: int) -> Floats:
    drawn: Floats = np.exp(rng.uniform(np.log(ends[0]), np.log(ends[1]), size))
    return drawn


NOISES: dict[str, Draw] = {
    "independent": ONE_SPEED["independent"],
    "AR(1) 0.3": partial(with_memory, memory=0.3),
    "5 % outlier nights": ONE_SPEED["5 % outlier nights"],
    "heavy tails (t3)": ONE_SPEED["heavy tails (t3)"],
}
# Number of speeds, and whether their distances are equal.
SPEEDS = {"three, equal": (3, True), "three": (3, False), "four": (4, False)}
KINDS = {
    f"{speeds}: {noise}": (speeds, noise)
    for speeds in SPEEDS
    for noise in NOISES
    if speeds == "three" or noise == "independent"
}


def logs_of(kind: str, text: str, nights: int) -> Floats:
    """A series: a speed is kept for a geometric number of nights, then another one is drawn."""
    rng = np.random.default_rng(zlib.crc32(f"{text} {kind}".encode()))
    speeds, noise = KINDS[kind]
    count, equal = SPEEDS[speeds]
    gaps = _log_uniform(rng, GAPS, 1 if equal else count - 1)
    levels = np.concatenate(([0.0], np.cumsum(np.resize(gaps, count - 1))))
    leaves = rng.random(nights) < 1 / _log_uniform(rng, VISITS, 1)
    moved = np.where(leaves, rng.integers(1, count, nights), 0)
    mode = (int(rng.integers(count)) + np.cumsum(moved)) % count
    logs: Floats = SIGMA * levels[mode] + NOISES[noise](rng, nights)
    return logs


def false_counts(kind: str, seeds: str, numbers: range) -> tuple[int, int]:
    """Count change points of series without a step; see stored_and_kept."""
    return stored_and_kept(
        logs_of(kind, f"{seeds} {number}", HISTORY + NIGHTS) for number in numbers
    )


def found_counts(kind: str, seeds: str, step: float, numbers: range) -> tuple[int, int]:
    """Series whose step of all speeds is found at the end, and other change points of them."""
    hits = others = 0
    for number in numbers:
        logs = logs_of(kind, f"{seeds} {step} {number}", SERIES_LENGTH)
        logs[STEP_AT:] += np.log1p(step) * (-1) ** number
        near = [abs(index - STEP_AT) <= MAX_DISTANCE for index in detected(logs)]
        hits += any(near)
        others += near.count(False)
    return hits, others


def counted(kind: str, seeds: str, step: float, numbers: range) -> tuple[int, int]:
    if step:
        return found_counts(kind, seeds, step, numbers)
    return false_counts(kind, seeds, numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--held-out", action="store_true", help="seeds that no rule was tuned on")
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    arguments = parser.parse_args()
    series, kinds = arguments.series, arguments.kind or list(KINDS)
    seeds = "held out" if arguments.held_out else "development"
    out = sys.stdout.write
    out("| speeds: noise | stored / 1,000 | standing / 1,000 |")
    out(" 2 % at the end (others) | 5 % |\n| --- |" + " ---: |" * 4 + "\n")
    todo = [
        (kind, seeds, step, range(first, min(first + SERIES_PER_TASK, series)))
        for kind in kinds
        for step in (0.0, *STEPS)
        for first in range(0, series, SERIES_PER_TASK)
    ]
    results = in_processes(counted, todo, arguments.processes)
    sums: dict[tuple[str, float], tuple[int, int]] = {}
    for (kind, _, step, _), (more, more_others) in zip(todo, results, strict=True):
        first, second = sums.get((kind, step), (0, 0))
        sums[kind, step] = first + more, second + more_others
    for kind in kinds:
        stored, kept = (1000 * count / (series * NIGHTS) for count in sums[kind, 0.0])
        out(f"| {kind} | {stored:.2f} | {kept:.2f} |")
        for step in STEPS:
            hits, others = sums[kind, step]
            out(f" {hits / series:.1%} ({others / series:.2f}) |")
        out("\n")


if __name__ == "__main__":
    main()

"""The retrospective pass, night by night: false change points, power, time.

Prints the tables that docs/statistics.md quotes, from fixed seeds:
    python benchmarks/verdicts/retrospective.py [--series 100] [--processes 1] [--kind NOISE ...]
"""

from __future__ import annotations

import argparse
import sys
import time
import zlib
from collections.abc import Callable, Iterable

import numpy as np
from in_processes import in_processes
from numpy.typing import NDArray
from yardsticks import kernel_pelt

from flexq_bench.stats.change_points import change_points
from flexq_bench.stats.follower import Follower
from flexq_bench.stats.log_series import SMALLEST_LOG_RATIO
from flexq_bench.stats.newest_step import FEWEST_POINTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Floats]

HISTORY, NIGHTS = 120, 100  # before the nights that are counted, and those
STEP_AT, SERIES_LENGTH = 100, 200
MAX_DISTANCE = 5  # nights from a step to its change point, and until it is found
STEPS = (0.01, 0.02, 0.05)
SIGMA = 0.01
GAP = 0.12
MAX_SHIFT = 2  # nights by which a change point may move and be the same
TIMED_SERIES = 400
SERIES_PER_TASK = 10


def with_memory(rng: np.random.Generator, nights: int, memory: float = 0.5) -> Floats:
    """AR(1) noise."""
    noise: Floats = rng.standard_normal(nights)
    noise[1:] *= np.sqrt(1 - memory * memory)
    for night in range(1, nights):
        noise[night] += memory * noise[night - 1]
    noise *= SIGMA
    return noise


def _outliers(rng: np.random.Generator, nights: int) -> Floats:
    size = rng.uniform(0.05, 0.3, nights) * rng.choice([-1, 1], nights)
    noise: Floats = SIGMA * rng.standard_normal(nights) + size * (rng.random(nights) < 0.05)
    return noise


def _sticky(rng: np.random.Generator, nights: int, gap: float = GAP) -> Floats:
    upper = (np.cumsum(rng.random(nights) < 0.1) + rng.integers(2)) % 2
    noise: Floats = SIGMA * rng.standard_normal(nights) + gap * upper
    return noise


def _spells(rng: np.random.Generator, nights: int) -> Floats:
    """Spells of 2 or 3 nights that are 3 to 20 % slower, every 25 nights or so, at σ 0.5 %."""
    noise: Floats = SIGMA / 2 * rng.standard_normal(nights)
    night = int(rng.exponential(25))
    while night < nights:
        length = int(rng.integers(2, 4))
        noise[night : night + length] += rng.uniform(0.03, 0.2)
        night += length + 8 + int(rng.exponential(17))
    return noise


KINDS: dict[str, Draw] = {
    "independent": lambda rng, nights: SIGMA * rng.standard_normal(nights),
    "AR(1) 0.5": with_memory,
    "heavy tails (t3)": lambda rng, nights: SIGMA * rng.standard_t(3, nights) / np.sqrt(3),
    "5 % outlier nights": _outliers,
    "sticky two-level, 12 % apart": _sticky,
    "sticky two-level, 5 % apart": lambda rng, nights: _sticky(rng, nights, 0.05),
    "two levels drawn anew, 12 % apart": lambda rng, nights: (
        SIGMA * rng.standard_normal(nights) + GAP * (rng.random(nights) < 0.5)
    ),
    "drift 0.1 % a night": lambda rng, nights: (
        SIGMA * rng.standard_normal(nights) + 0.001 * np.arange(nights)
    ),
    "two levels drawn anew, 12 % apart, on a drift": lambda rng, nights: (
        SIGMA * rng.standard_normal(nights)
        + GAP * (rng.random(nights) < 0.5)
        + 0.0005 * np.arange(nights)
    ),
    "slow spells of 2 or 3 nights": _spells,
    "independent, σ 0.3 %": lambda rng, nights: 0.003 * rng.standard_normal(nights),
}


def detected(logs: Floats) -> list[int]:
    return [point.index for point in change_points(20 * np.exp(logs))]


def false_counts(kind: str, numbers: range) -> tuple[int, int]:
    """Count change points of series without a change; see stored_and_kept."""
    seeds = (zlib.crc32(f"{kind} {number}".encode()) for number in numbers)
    return stored_and_kept(
        KINDS[kind](np.random.default_rng(seed), HISTORY + NIGHTS) for seed in seeds
    )


def stored_and_kept(series: Iterable[Floats]) -> tuple[int, int]:
    """Count the change points that any night stored, and those of the last night.

    Those stored before the counted nights are left out. series: logarithms, HISTORY + NIGHTS each.
    """
    stored = kept = 0
    for logs in series:
        seen_by_now = Follower(logs, SMALLEST_LOG_RATIO)
        known: list[int] = []
        before = 0
        for night in range(FEWEST_POINTS, HISTORY + NIGHTS + 1):
            seen_by_now.see(night)
            now = [index for index, _ in seen_by_now.history.steps]
            known += [
                index for index in now if all(abs(index - other) > MAX_SHIFT for other in known)
            ]
            if night == HISTORY:
                before = len(known)
        stored += len(known) - before
        kept += len(now)
    return stored, kept


def with_step(kind: str, step: float, number: int) -> Floats:
    """A series whose level changes for good, of even numbers up."""
    rng = np.random.default_rng(zlib.crc32(f"{kind} {step} {number}".encode()))
    logs = KINDS[kind](rng, SERIES_LENGTH)
    logs[STEP_AT:] += np.log1p(step) * (-1) ** number
    return logs


def power_counts(kind: str, step: float, numbers: range) -> tuple[int, int]:
    """Series whose step is found within 5 nights, and at the end."""
    early = late = 0
    for number in numbers:
        logs = with_step(kind, step, number)
        looks = [detected(logs[: STEP_AT + night]) for night in range(3, MAX_DISTANCE + 1)]
        early += any(_is_there(look) for look in looks)
        late += _is_there(detected(logs))
    return early, late


def _is_there(look: list[int]) -> bool:
    return any(abs(index - STEP_AT) <= MAX_DISTANCE for index in look)


def counted(kind: str, step: float, numbers: range) -> tuple[int, int]:
    """Count false change points if the step is 0, else found steps."""
    return power_counts(kind, step, numbers) if step else false_counts(kind, numbers)


def times(kind: str) -> tuple[float, float, float]:
    """Seconds of 10,000 series of 400 nights, of one of 5,000, and that over PELT's of the same."""
    rng = np.random.default_rng(zlib.crc32(kind.encode()))
    short = [KINDS[kind](rng, 400) for _ in range(TIMED_SERIES)]
    long = np.clip(KINDS[kind](rng, 5000), -7, 7)
    start = time.process_time()
    for logs in short:
        detected(logs)
    middle = time.process_time()
    detected(long)
    end = time.process_time()
    kernel_pelt(np.exp(long))
    pelt = time.process_time() - end
    return 10_000 / TIMED_SERIES * (middle - start), end - middle, (end - middle) / pelt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=100)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kind", action="append", choices=list(KINDS))
    arguments = parser.parse_args()
    series, kinds = arguments.series, arguments.kind or list(KINDS)
    detected(np.zeros(20))
    kernel_pelt(np.arange(20.0))  # what is imported on the first call is no part of a time
    out = sys.stdout.write
    out("| noise | stored / 1,000 | standing / 1,000 | 1 % in 5 nights / at the end | 2 % | 5 % |")
    out(" 10,000 x 400 | 5,000 | ratio to PELT |\n| --- |" + " ---: |" * 8 + "\n")
    todo = [
        (kind, step, range(first, min(first + SERIES_PER_TASK, series)))
        for kind in kinds
        for step in (0.0, *STEPS)
        for first in range(0, series, SERIES_PER_TASK)
    ]
    results = in_processes(counted, todo, arguments.processes)
    sums: dict[tuple[str, float], Ints] = {}
    for (kind, step, _), counts in zip(todo, results, strict=True):
        sums[kind, step] = sums.get((kind, step), np.zeros(2, dtype=np.int64)) + counts
    for kind in kinds:
        stored, kept = 1000 * sums[kind, 0.0] / (series * NIGHTS)
        out(f"| {kind} | {stored:.2f} | {kept:.2f} |")
        for step in STEPS:
            early, late = sums[kind, step] / series
            out(f" {early:.1%} / {late:.1%} |")
        all_short, one_long, ratio = times(kind)
        out(f" {all_short:.0f} s | {one_long:.2f} s | {ratio:.2f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

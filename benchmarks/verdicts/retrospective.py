"""The retrospective pass on simulated series of 200 nights: false change points, power, time.

Prints the table that docs/statistics.md quotes, from fixed seeds; a quarter of the 10,000 series
that are timed has a step:
    python benchmarks/verdicts/retrospective.py
"""

from __future__ import annotations

import sys
import time
import zlib

import numpy as np
from noise import KINDS, nightly

from flexq_bench.stats import change_points

SERIES = 500
NIGHTS = 200
STEP_AT = 100
TIMED = 10_000


def found(kind: str, step: float) -> list[list[int]]:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {step}".encode()))
    logs = nightly(kind, rng, SERIES, NIGHTS)
    logs[:, STEP_AT:] += np.log1p(step)
    return [[point.index for point in change_points(row)] for row in np.exp(logs)]


def main() -> None:
    out = sys.stdout.write
    out("| noise, σ 1 % | series with a false one | 2 % found within ±3 nights | 5 % |\n")
    out("| --- | ---: | ---: | ---: |\n")
    for kind in KINDS:
        false = np.mean([bool(indices) for indices in found(kind, 0.0)])
        hits = [
            np.mean([any(abs(i - STEP_AT) <= 3 for i in indices) for indices in found(kind, step)])
            for step in (0.02, 0.05)
        ]
        out(f"| {kind} | {false:.1%} | {hits[0]:.1%} | {hits[1]:.1%} |\n")
        sys.stdout.flush()
    logs = nightly("Gaussian", np.random.default_rng(0), TIMED, NIGHTS)
    logs[::4, STEP_AT:] += np.log1p(0.03)
    start = time.perf_counter()
    for row in np.exp(logs):
        change_points(row)
    out(f"\n{TIMED:,} series in {time.perf_counter() - start:.0f} s on one core\n")


if __name__ == "__main__":
    main()

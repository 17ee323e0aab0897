"""Coverage of the interval of a case, and how often it closes, on simulated placements.

Prints the table that docs/protocol.md quotes, from a fixed seed:
    python benchmarks/verdicts/placement_intervals.py [--trials 400]

Placements are added as the protocol does: until the interval is within ± 0.25 % of the estimate,
until it would take more of them than the budget has time for, or until the budget is over.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexq_bench.measure import PROTOCOL_CUDA
from flexq_bench.measure.sampling import placements_needed
from flexq_bench.stats import Interval, hierarchical_interval, placement_interval

PLACEMENT_S = 0.2  # of allocating, warming up and sampling
TRUTH = 20_000  # placements that the median over all placements is known from

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator], Floats]  # samples of one placement, about 1
Find = Callable[[list[Floats]], Interval]


def gaussian(between: float, within: float, samples: int) -> Draw:
    return lambda rng: 1 + between * rng.standard_normal() + within * rng.standard_normal(samples)


def heavy(between: float, within: float, samples: int) -> Draw:
    """Offsets of placements with Student's t(3); between: their scale."""
    return lambda rng: 1 + between * rng.standard_t(3) + within * rng.standard_normal(samples)


def two_speeds(share: float, apart: float, between: float, within: float, samples: int) -> Draw:
    """A share of the placements is slower."""
    same = gaussian(between, within, samples)
    return lambda rng: same(rng) + apart * (rng.random() < share)


def mixed(share: float, apart: float, between: float, within: float, samples: int) -> Draw:
    """A share of the samples of each placement is slower."""
    same = gaussian(between, within, samples)
    return lambda rng: same(rng) + apart * (rng.random(samples) < share)


WORLDS: dict[str, Draw] = {
    "placements 0.15 %, samples 0.2 % (12)": gaussian(0.0015, 0.002, 12),
    "placements 0.25 %, samples 0.5 % (20)": gaussian(0.0025, 0.005, 20),
    "placements 0.1 %, samples 1.2 % (39)": gaussian(0.001, 0.012, 39),
    "placements 0.2 %, samples 1.2 % (39)": gaussian(0.002, 0.012, 39),
    "placements 0.1 %, samples 2.6 % (34)": gaussian(0.001, 0.026, 34),
    "placements t(3) 0.06 %, samples 1.2 % (39)": heavy(0.0006, 0.012, 39),
    "30 % of placements 0.6 % slower, samples 0.2 % (12)": two_speeds(0.3, 0.006, 0.001, 0.002, 12),
    "30 % of placements 0.6 % slower, samples 1.2 % (39)": two_speeds(0.3, 0.006, 0.001, 0.012, 39),
    "40 % of samples 2.4 % slower (45)": mixed(0.4, 0.024, 0.0005, 0.004, 45),
}
INTERVALS: dict[str, Find] = {
    "bootstrap alone": lambda placements: hierarchical_interval(placements, seed=1),
    "protocol": lambda placements: placement_interval(placements, seed=1),
}


def measured(draw: Draw, find: Find, rng: np.random.Generator) -> tuple[Interval, bool, int]:
    """The interval of a case, whether it closed, and after how many placements."""
    protocol, placements = PROTOCOL_CUDA, [draw(rng) for _ in range(PROTOCOL_CUDA.min_placements)]
    while True:
        interval, elapsed_s = find(placements), PLACEMENT_S * len(placements)
        if interval.is_within(protocol.ci_tolerance):
            return interval, True, len(placements)
        needed = placements_needed([one.tolist() for one in placements], protocol.ci_tolerance)
        if max(elapsed_s, PLACEMENT_S * needed) >= protocol.budget_s:
            return interval, False, len(placements)
        placements.append(draw(rng))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=400)
    trials = parser.parse_args().trials
    out = sys.stdout.write
    out("| scatter (samples a placement) | interval | covers | closes | placements |\n")
    out("| --- | --- | ---: | ---: | ---: |\n")
    for world, draw in WORLDS.items():
        rng = np.random.default_rng(zlib.crc32(world.encode()))
        truth = float(np.median([np.median(draw(rng)) for _ in range(TRUTH)]))
        for name, find in INTERVALS.items():
            rng = np.random.default_rng(zlib.crc32(world.encode()))
            found = [measured(draw, find, rng) for _ in range(trials)]
            covered = sum(interval.low <= truth <= interval.high for interval, _, _ in found)
            closed = sum(closed for _, closed, _ in found)
            taken = sum(placements for _, _, placements in found)
            out(f"| {world} | {name} | {covered / trials:.1%} | {closed / trials:.0%} | ")
            out(f"{taken / trials:.1f} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

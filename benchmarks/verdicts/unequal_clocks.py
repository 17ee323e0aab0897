"""Verdicts of comparisons whose sides have different SM clocks, on simulated blocks.

Prints the table that docs/statistics.md quotes, from a fixed seed:
    python benchmarks/verdicts/unequal_clocks.py
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter

import numpy as np
from noise import PROCESS_SIGMA, comparison
from simulate import Candidate, decide, most_pairs

from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import Verdict

MHZ = 1900.0
CLOCK_SIGMA = 0.002  # ln, of one side's clock in a block
OCCASIONAL_SHARE = 0.2  # of blocks in which one side is clocked lower, in the rows that say so
VERDICTS = (Verdict.SLOWER, Verdict.FASTER, Verdict.SAME, Verdict.AMBIGUOUS, Verdict.NO_DATA)


def judged(
    rng: np.random.Generator, *, change: float, apart: float, bound: float, occasional: bool
) -> Verdict:
    """The verdict on one comparison alone, after as many looks as it takes.

    change, apart: ln, of the code and of head's lower clock. bound: how much of the clock's change
    the time has: 1 where the SMs decide, 0 where the memory does.
    """
    rules = InterleaveRules()
    base, head, pair = comparison(
        "Gaussian", rng, shift=change, pairs=most_pairs(rules), process_sigma=PROCESS_SIGMA
    )
    lower = CLOCK_SIGMA * rng.standard_normal((2, pair.size))
    lower[1] += apart
    if occasional:
        struck = rng.random(lower.shape) < OCCASIONAL_SHARE / 2
        lower += struck * rng.uniform(0.02, 0.1, lower.shape)
    base, head = base * np.exp(bound * lower[0]), head * np.exp(bound * lower[1])
    mhz = MHZ * np.exp(-lower)
    ((confirmation, _),) = decide([Candidate(base, head, pair, mhz)], rules)
    return confirmation.verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    trials = parser.parse_args().trials
    out = sys.stdout.write
    out(f"| true change | head's clock | of it in the time | {' | '.join(VERDICTS)} |\n")
    out(f"| ---: | --- | ---: |{' ---: |' * len(VERDICTS)}\n")
    rows = [(0.0, 0.0, bound, True) for bound in (0.0, 1.0)]
    rows += [
        (change, apart, bound, False)
        for change in (0.0, 0.03, 0.05, 0.75)
        for apart in (0.0, -0.02, -0.05, 0.02)
        for bound in (0.0, 1.0)
        if apart or bound
    ]
    for change, apart, bound, occasional in rows:
        rng = np.random.default_rng(zlib.crc32(repr((change, apart, bound, occasional)).encode()))
        verdicts = Counter(
            judged(
                rng,
                change=float(np.log1p(change)),
                apart=-float(np.log1p(apart)),
                bound=bound,
                occasional=occasional,
            )
            for _ in range(trials)
        )
        clock = (
            f"in {OCCASIONAL_SHARE:.0%} of blocks 2 to 10% lower" if occasional else f"{apart:+.0%}"
        )
        shares = " | ".join(f"{verdicts[verdict] / trials:.1%}" for verdict in VERDICTS)
        out(f"| {change:+.0%} | {clock} | {bound:.0%} | {shares} |\n")


if __name__ == "__main__":
    main()

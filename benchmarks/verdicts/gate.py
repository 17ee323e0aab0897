"""What a gate answers on made comparisons: its exit codes where nothing changed, and where one did.

Prints the table that docs/statistics.md quotes, from fixed seeds (a minute):
    python benchmarks/verdicts/gate.py [--looks 2]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import numpy as np
from simulate import decide, generator, looks_at

from ci.gate_perf import exit_code_of, outcome_of
from flexq_bench.exit_codes import ExitCode
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import Verdict, confirm_together

GATES = 200
LIMITS = [1.0] * 20 + [2.0] * 6  # percent, of the planned cases
STEP = 0.03  # of one case with the smallest limit
SIGMAS = (0.002, 0.005, 0.01)
KINDS = ("Gaussian", "sticky bimodal", "a third slow", "Student t(2)")


def answer(
    kind: str, sigma: float, step: float, rng: np.random.Generator, rules: InterleaveRules
) -> ExitCode:
    shifts = [float(np.log1p(step)), *[0.0] * (len(LIMITS) - 1)]
    cases = [looks_at(kind, rng, shift, sigma, rules) for shift in shifts]
    found = confirm_together([one for one, _ in decide(cases, rules)], rate=rules.rate)
    return exit_code_of(
        outcome_of(one, limit, is_worse=one.verdict is Verdict.SLOWER)
        for one, limit in zip(found, LIMITS, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=InterleaveRules().looks)
    rules = InterleaveRules(looks=parser.parse_args().looks)
    out = sys.stdout.write
    out("| between processes | quiet: 0 | 1 | 3 | one is 3 % slower: 1 | 3 |\n")
    out("| --- | ---: | ---: | ---: | ---: | ---: |\n")
    for sigma in SIGMAS:
        for kind in KINDS:
            out(f"| {kind}, σ {sigma:.1%} |")
            for step, codes in ((0.0, (0, 1, 3)), (STEP, (1, 3))):
                rng = generator("gate", kind, sigma, step)
                counts = Counter(answer(kind, sigma, step, rng, rules) for _ in range(GATES))
                for code in codes:
                    out(f" {counts[ExitCode(code)] / GATES:.1%} |")
            out("\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

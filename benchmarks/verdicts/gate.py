"""Exit codes of the performance gate on simulated comparisons, without a slow-down and with one.

Prints the table that docs/statistics.md quotes, from fixed seeds (a minute):
    python benchmarks/verdicts/gate.py [--looks 2] [--processes 1]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import numpy as np
from in_processes import in_processes
from simulate import candidate_of, decide, generator

from flexq_bench.ci.gate_perf import outcome_of
from flexq_bench.ci.report_data import exit_code_of
from flexq_bench.exit_codes import ExitCode
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import Verdict

GATES = 200
LIMITS = [1.0] * 20 + [2.0] * 6  # percent, of the planned cases
STEP = 0.03  # of one case with the smallest limit
SIGMAS = (0.002, 0.005, 0.01)
CODES = ((0, 1, 3), (1, 3))  # that are shown of quiet gates, and of those with a slower case
KINDS = ("Gaussian", "sticky bimodal", "a third slow", "Student t(2)")


def answer(
    kind: str, sigma: float, step: float, rng: np.random.Generator, rules: InterleaveRules
) -> ExitCode:
    shifts = [float(np.log1p(step)), *[0.0] * (len(LIMITS) - 1)]
    cases = [candidate_of(kind, rng, shift, sigma, rules) for shift in shifts]
    confirmations = [confirmation for confirmation, _ in decide(cases, rules)]
    return exit_code_of(
        outcome_of(confirmation, limit, is_worse=confirmation.verdict is Verdict.SLOWER)
        for confirmation, limit in zip(confirmations, LIMITS, strict=True)
    )


def answers(kind: str, sigma: float, step: float, rules: InterleaveRules) -> Counter[ExitCode]:
    rng = generator("gate", kind, sigma, step)
    return Counter(answer(kind, sigma, step, rng, rules) for _ in range(GATES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looks", type=int, default=InterleaveRules().looks)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    rules = InterleaveRules(looks=arguments.looks)
    out = sys.stdout.write
    out("| between processes | quiet: 0 | 1 | 3 | one is 3 % slower: 1 | 3 |\n")
    out("| --- | ---: | ---: | ---: | ---: | ---: |\n")
    todo = [(kind, sigma, step) for sigma in SIGMAS for kind in KINDS for step in (0.0, STEP)]
    rows = in_processes(answers, [(*task, rules) for task in todo], arguments.processes)
    for (kind, sigma, step), counts in zip(todo, rows, strict=True):
        out(" " if step else f"| {kind}, σ {sigma:.1%} | ")
        out(" | ".join(f"{counts[ExitCode(code)] / GATES:.1%}" for code in CODES[bool(step)]))
        out(" |\n" if step else " |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Error rates and cost of comparisons that end early if a change is clear, on simulated processes.

Prints the tables that docs/comparisons.md quotes, from fixed seeds:
    python benchmarks/verdicts/clear_changes.py [--processes 1] [--trials 5000]
Rows "12 pairs" and "verdict" are without an early end: a step of a bisection then ends with the
verdict on its commit, and its 99 % bounds decide.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
from in_processes import in_processes
from simulate import ALERTS, candidate_of, decide, generator

from flexq_bench.ci.bisect import StepOutcome, side_is_clear, step_of
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts.alert_rule import SURE_PLACEMENTS

NOISE = (
    ("Gaussian", 0.005),
    ("Gaussian", 0.01),
    ("sticky bimodal", 0.01),
    ("sticky bimodal", 0.06),  # two speeds 12 % apart
    ("a third slow", 0.01),
    ("Student t(2)", 0.01),
)
CASE_COUNTS = (1, 26)  # cases of a comparison; one of them has the change
CHANGES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.9)


class TwelvePairs(InterleaveRules):
    """Rules by which a clear change needs as many pairs of processes as any other."""

    def pairs_for_clear(self, clear: int, compared: int, *, is_far: bool = False) -> int:
        return SURE_PLACEMENTS


RULES = {"12 pairs": TwelvePairs(), "early end": InterleaveRules()}


def comparisons(
    name: str, kind: str, sigma: float, together: int, change: float, trials: int
) -> tuple[float, float]:
    """Share of slower and faster, and pairs of processes, of the case with the change.

    Without a change all cases count. The draws are the same by both rules.
    """
    rng = generator("clear", kind, sigma, together, change)
    rules, shift = RULES[name], float(np.log1p(change))
    counted = []
    for _ in range(trials // together if change == 0 else trials):
        shifts = [shift, *[0.0] * (together - 1)]
        night = decide([candidate_of(kind, rng, by, sigma, rules) for by in shifts], rules)
        counted += night if change == 0 else night[:1]
    alerts = np.mean([confirmation.verdict in ALERTS for confirmation, _ in counted])
    return float(alerts), float(np.mean([pairs for _, pairs in counted]))


def steps(
    early: bool, kind: str, sigma: float, total: float, is_changed: bool, trials: int
) -> tuple[float, float, float]:
    """Share of bisection steps on the wrong side and skipped ones, and pairs of processes."""
    rng = generator("step", kind, sigma, total, is_changed)
    whole = float(np.log1p(total))
    rules = InterleaveRules()
    step_rules = replace(rules, suffices=partial(side_is_clear, whole)) if early else TwelvePairs()
    outcomes: Counter[StepOutcome] = Counter()
    pairs = []
    for _ in range(trials):
        candidate = candidate_of(kind, rng, whole * is_changed, sigma, rules)
        ((confirmation, taken),) = decide([candidate], step_rules)
        if early:
            outcomes[step_of("", candidate.judge().comparison, whole).outcome] += 1
        else:
            is_clear = confirmation.low > whole / 2 or confirmation.high < whole / 2
            is_slower = confirmation.log_ratio > whole / 2
            side = StepOutcome.CHANGED if is_slower else StepOutcome.UNCHANGED
            outcomes[side if is_clear else StepOutcome.SKIPPED] += 1
        pairs.append(taken)
    wrong = outcomes[StepOutcome.UNCHANGED if is_changed else StepOutcome.CHANGED]
    return wrong / trials, outcomes[StepOutcome.SKIPPED] / trials, float(np.mean(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=5000)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    out = sys.stdout.write
    out("| between processes | cases | rule | false / 1,000 | 1 % | 2 % | 5 % |")
    out(" pairs: none | 10 % | 90 % |\n| --- | ---: | --- |" + " ---: |" * 7 + "\n")
    rows = [(name, *noise, cases) for noise in NOISE for cases in CASE_COUNTS for name in RULES]
    powers = {1: options.trials // 10, 26: options.trials // 25}
    todo = [
        (*row, change, options.trials if change == 0 else powers[row[-1]])
        for row in rows
        for change in CHANGES
    ]
    results = in_processes(comparisons, todo, options.processes)
    for name, kind, sigma, cases in rows:
        none, one, two, five, ten, ninety = (next(results) for _ in CHANGES)
        out(f"| {kind}, σ {sigma:.1%} | {cases} | {name} | {1000 * none[0]:.2f} | {one[0]:.1%} |")
        out(f" {two[0]:.1%} | {five[0]:.1%} | {none[1]:.1f} | {ten[1]:.1f} | {ninety[1]:.1f} |\n")
        sys.stdout.flush()
    out("\n| between processes | whole change | rule | wrong side | skipped | pairs: unchanged |")
    out(" changed |\n| --- | ---: | --- | ---: | ---: | ---: | ---: |\n")
    searches = [
        (early, *noise, total)
        for noise in NOISE
        for total in (0.02, 0.1, 0.9)
        for early in (False, True)
    ]
    tasks = [(*search, side, options.trials // 5) for search in searches for side in (False, True)]
    answers = in_processes(steps, tasks, options.processes)
    for early, kind, sigma, total in searches:
        unchanged, changed = next(answers), next(answers)
        wrong, skipped = ((unchanged[i] + changed[i]) / 2 for i in (0, 1))
        out(f"| {kind}, σ {sigma:.1%} | {total:.0%} | {'early end' if early else 'verdict'} |")
        out(f" {wrong:.1%} | {skipped:.1%} | {unchanged[2]:.1f} | {changed[2]:.1f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

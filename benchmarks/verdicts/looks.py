"""Errors, power and pairs of processes of schedules of looks, on simulated gates.

Prints the table that docs/statistics.md quotes, from fixed seeds:
    python benchmarks/verdicts/looks.py [--gates 500] [--processes 1] [--stored FOLDER,FOLDER]
                                        [--unchanged]
Each gate has 8 cases with a limit of 1 %. "false" counts the gates without a change that report a
slow-down, "found" the gates that report the slow-down of their first case, "pairs" the pairs of
processes of that case, and of all cases together ("all"). "now" is on CPUs: on a GPU, a case that
is 5 % off after its first pair takes those of the first look at once. --stored: instead of
simulated noise, blocks of commits compared with themselves (`hardware.py noise --out FOLDER`, or
gates of unchanged heads, `gate_times.py --blocks FOLDER`), drawn by placement; either side of one
is base. --unchanged: gates without a change.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path

import numpy as np
from in_processes import in_processes
from noise import Floats
from simulate import Candidate, candidate_of, decide, generator, most_pairs

from flexq_bench.ci.gate_inputs import suffices
from flexq_bench.ci.policy import Limit, Policy
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.verdicts import CaseComparison, Verdict
from flexq_bench.verdicts.alert_rule import BLOCKS
from flexq_bench.workloads.suites import load_suite

CASES = 8
LIMIT_PERCENT = 1.0
STEPS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.15)
NOISE = (
    ("Gaussian", 0.002),
    ("Gaussian", 0.005),
    ("Gaussian", 0.01),
    ("Gaussian", 0.05),
    ("sticky bimodal", 0.005),
    ("a third slow", 0.01),
    ("Student t(2)", 0.005),
)


class ThreeLooks(InterleaveRules):
    """Nothing ends between looks, and every undecided case gets all of them."""

    @property
    def stages(self) -> Mapping[int, bool]:
        return {pairs: True for pairs, is_look in super().stages.items() if is_look}

    def is_hopeless(self, result: CaseComparison) -> bool:
        return False


# The rules, and whether spare pairs are taken (`decide`).
COURSES: dict[str, tuple[type[InterleaveRules], bool]] = {
    "3 looks": (ThreeLooks, False),
    "now": (InterleaveRules, False),
    "on a GPU": (InterleaveRules, True),
}


@cache
def stored(folder: str) -> list[tuple[Floats, float]]:
    """Of each case, ln base and ln head by placement, [placements, blocks, 2], and its CPU wait."""
    places: dict[str, dict[tuple[int, int], list[Floats]]] = defaultdict(lambda: defaultdict(list))
    waits: dict[str, list[float]] = defaultdict(list)
    for block in json.loads(gzip.decompress((Path(folder) / "noise.json.gz").read_bytes())):
        logs = np.log([block["base_us"], block["head_us"]])
        waits[block["case"]].append(block.get("cpu_wait", 0.0))
        if np.isfinite(logs).all():  # else its clock was too low
            places[block["case"]][block["process"], block["placement"]].append(logs)
    cases = []
    for case, found in places.items():
        logs = np.array([place[:BLOCKS] for place in found.values() if len(place) >= BLOCKS])
        cases.append((logs, float(np.mean(waits[case]))))
    return cases


def drawn(
    folder: str, number: int, rng: np.random.Generator, shift: float, rules: InterleaveRules
) -> Candidate:
    """A case of stored blocks whose head is slower by `shift` (ln).

    Both sides of a placement ran the same code, so each may be base.
    """
    cases, pairs = stored(folder), most_pairs(rules)
    logs, cpu_wait = cases[number % len(cases)]
    chosen = logs[rng.integers(len(logs), size=pairs)]
    is_swapped = rng.integers(2, size=pairs).astype(bool)
    chosen = np.where(is_swapped[:, None, None], chosen[..., ::-1], chosen).reshape(-1, 2)
    base, head = np.exp(chosen + np.array([0.0, shift])).T
    labels = np.repeat(np.arange(pairs), BLOCKS)
    return Candidate(base, head, labels, cpu_wait=cpu_wait)


def gates(kind: str, sigma: float, step: float, count: int) -> list[tuple[float, float, float]]:
    """By course, the share of gates that report the first case (any case, if step is 0), and pairs
    of processes of the first case and of all. All courses judge the same draws.

    kind: of the noise between processes, by its sigma; or a folder of stored blocks, with sigma 0.
    """
    rng = generator("looks", kind, sigma, step)
    limit = Limit(kernels=("*",), slower_percent=LIMIT_PERCENT)
    policy = Policy("simulated", load_suite("smoke"), limit)
    of_course = [
        (rules(suffices=partial(suffices, policy)), spares) for rules, spares in COURSES.values()
    ]
    results = np.zeros((len(COURSES), 3))
    for gate in range(count):
        shifts = [float(np.log1p(step)), *[0.0] * (CASES - 1)]
        drawing = of_course[-1][0]
        night = [
            candidate_of(kind, rng, by, sigma, drawing)
            if sigma
            else drawn(kind, gate + number, rng, by, drawing)
            for number, by in enumerate(shifts)
        ]
        for result, (rules, spares) in zip(results, of_course, strict=True):
            for candidate in night:
                candidate.pairs = 0
            found = decide(night, rules, spares=spares)
            slower = [confirmation.verdict is Verdict.SLOWER for confirmation, _ in found]
            pairs = [taken for _, taken in found]
            result += (slower[0] if step else any(slower), pairs[0], sum(pairs))
    return [(float(share), float(first), float(every)) for share, first, every in results / count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gates", type=int, default=500)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--stored", default="", metavar="FOLDER,FOLDER")
    parser.add_argument("--unchanged", action="store_true")
    options = parser.parse_args()
    steps = STEPS[:1] if options.unchanged else STEPS
    of_noise = [(folder, 0.0) for folder in options.stored.split(",") if folder] or NOISE
    out = sys.stdout.write
    out("| between processes | looks | false |")
    out("".join(f" {step:.0%} found |" for step in steps[1:]))
    out("".join(f" pairs: {step:.0%} |" for step in steps) + " all: 0% |\n")
    out("| --- | --- |" + " ---: |" * (2 * len(steps) + 1) + "\n")
    todo = [(*noise, step, options.gates) for noise in of_noise for step in steps]
    results = in_processes(gates, todo, options.processes)
    for kind, sigma in of_noise:
        by_course = zip(*(next(results) for _ in steps), strict=True)
        for name, of_steps in zip(COURSES, by_course, strict=True):
            out(f"| {f'{kind}, σ {sigma:.1%}' if sigma else kind} | {name} |")
            out("".join(f" {share:.1%} |" for share, _, _ in of_steps))
            out("".join(f" {pairs:.1f} |" for _, pairs, _ in of_steps))
            out(f" {of_steps[0][2]:.0f} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

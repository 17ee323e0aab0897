"""Error rates of the gate's planned test on losses that are skewed, autocorrelated or concentrated.

    python benchmarks/accuracy/gate_power.py [--draws 4000] [--alpha 0.01] [--power 0.95]
    python benchmarks/accuracy/gate_power.py --test tail [--draws 400]  # of the tail's test

Each row draws series of paired losses, runs the test on as many of them as it plans, and counts how
often it fails a model: without a loss (false alarms), and with a mean loss of the effect (power).
The deviation is in units of the effect; `segments` is the mean number that the test took.

- normal; t3: Student's t with 3 degrees of freedom
- lognormal right, left: skewed, with the sigma of the logarithm
- AR(1): autocorrelated, in the text's order: the whole of a text is its sample
- sampled AR(1): a stratified random sample of a text four times as long
- 5 %: the mean loss is carried by 5 % of the segments, at random

The test of the tail is not planned: rows have its false alarms for losses whose excess is the limit
on average (0 if it is below), and how often a loss of 10 and 20 deviations on 5 % of the segments
fails, and does not pass, if the limit is three deviations above the excess without it.

Exit code 1: more than 1.5 times alpha, or less than the planned power (0.8 for 5 %), by more than
two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexq_bench.accuracy.sampling import sampled_order
from flexq_bench.ci.accuracy_gate.checks.tail import judge_tail
from flexq_bench.ci.report_data import GateOutcome
from flexq_bench.stats import TestPlan, tail_size
from flexq_bench.stats.planned_mean import simulated_decisions

Losses = NDArray[np.float64]
EFFECT = 0.01  # nats per token
LONGEST = 1600  # segments of a text
CONCENTRATED, CONCENTRATED_POWER = 0.05, 0.8
TAIL_SEGMENTS, TAIL_DRAWS, TAIL_LOSSES = (60, 120, 240), 20_000, (10, 20)


def student(rng: np.random.Generator, shape: tuple[int, int]) -> Losses:
    return rng.standard_t(3, shape) / math.sqrt(3)


def lognormal(sigma: float, sign: int) -> Callable[..., Losses]:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Losses:
        variance = sigma * sigma
        centred = rng.lognormal(0.0, sigma, shape) - math.exp(variance / 2)
        return sign * centred / math.sqrt(math.expm1(variance) * math.exp(variance))

    return draw


def autoregressive(lag1: float) -> Callable[..., Losses]:
    def draw(rng: np.random.Generator, shape: tuple[int, int]) -> Losses:
        series = rng.normal(size=shape)
        for place in range(1, shape[1]):
            series[:, place] *= math.sqrt(1 - lag1 * lag1)
            series[:, place] += lag1 * series[:, place - 1]
        return series

    return draw


def sampled(draw: Callable[..., Losses]) -> Callable[..., Losses]:
    """Losses of a quarter of a text's segments, sampled at random, in the text's order."""

    def sample(rng: np.random.Generator, shape: tuple[int, int]) -> Losses:
        whole = draw(rng, (shape[0], 4 * shape[1]))
        one_document = np.zeros(4 * shape[1], np.int64)
        order = sampled_order(one_document, "gate_power")[: shape[1]]
        return whole[:, np.sort(order)]

    return sample


KINDS: dict[str, Callable[..., Losses]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "t3": student,
    "lognormal right 0.5": lognormal(0.5, 1),
    "lognormal left 0.5": lognormal(0.5, -1),
    "lognormal right 1": lognormal(1.0, 1),
    "lognormal left 1": lognormal(1.0, -1),
    "AR(1) 0.3": autoregressive(0.3),
    "AR(1) 0.6": autoregressive(0.6),
    "sampled AR(1) 0.6": sampled(autoregressive(0.6)),
}


def main() -> int:
    """Simulate, print a JSON line for each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--alpha", type=float, default=0.01)
    parser.add_argument("--power", type=float, default=0.95)
    parser.add_argument("--test", choices=("mean", "tail"), default="mean")
    parser.add_argument("--deviations", type=float, nargs="+", default=[1.0, 3.0])
    options = parser.parse_args()
    if options.test == "tail":
        rows = [
            tail_row(name, draw, segments, options)
            for name, draw in KINDS.items()
            for segments in TAIL_SEGMENTS
            if not name.startswith("sampled")
        ]
        return 0 if all(rows) else 1
    plan, right = TestPlan(EFFECT, options.alpha, options.power), True
    for name, draw in KINDS.items():
        for deviation in options.deviations:
            shape = options.draws, LONGEST
            series = EFFECT * deviation * draw(np.random.default_rng(0), shape)
            null = simulated_decisions(plan, series)
            lossy = simulated_decisions(plan, series + EFFECT)
            right &= say(name, deviation, options, lossy, null)
    for deviation in options.deviations:
        rng, shape = np.random.default_rng(0), (options.draws, LONGEST)
        series = EFFECT * deviation * rng.normal(size=shape)
        series += EFFECT / CONCENTRATED * (rng.random(shape) < CONCENTRATED)
        right &= say("5 %", deviation, options, simulated_decisions(plan, series), None)
    return 0 if right else 1


def tail_row(
    name: str, draw: Callable[..., Losses], segments: int, options: argparse.Namespace
) -> bool:
    """Simulate the test of the tail, print a row; returns whether false alarms keep to alpha."""
    rng = np.random.default_rng(0)
    many = draw(rng, (TAIL_DRAWS, segments))
    count = tail_size(segments)
    ordered = np.sort(many, axis=1)
    usual = max(0.0, float((ordered[:, -count:].mean(1) + ordered[:, :count].mean(1)).mean()))
    series = draw(rng, (options.draws, segments))

    def judged(losses: Losses, bound: float) -> tuple[float, float]:
        """Shares that fail, and that don't pass."""
        outcomes = [judge_tail(row, bound, options.alpha)[1] for row in losses]
        fail, other = (outcomes.count(x) for x in (GateOutcome.FAIL, GateOutcome.AMBIGUOUS))
        return fail / len(outcomes), (fail + other) / len(outcomes)

    alarms, _ = judged(series, usual)
    row = {"losses": name, "segments": segments, "false_alarms": round(alarms, 4)}
    for loss in TAIL_LOSSES:
        damaged = series + loss * (rng.random(series.shape).argsort(1) < count)
        fails, no_pass = judged(damaged, usual + 3)
        row |= {f"{loss}_fails": round(fails, 3), f"{loss}_does_not_pass": round(no_pass, 3)}
    most = 1.5 * options.alpha
    right = bool(alarms <= most + 2 * _error(most, options.draws))
    sys.stdout.write(json.dumps({**row, "right": right}) + "\n")
    sys.stdout.flush()
    return right


def say(name: str, deviation: float, options: argparse.Namespace, lossy, null) -> bool:  # type: ignore[no-untyped-def]
    """Print a row; returns whether its rates keep to the plan."""
    planned = options.power if null is not None else CONCENTRATED_POWER
    power = float(lossy[0].mean())
    row = {"losses": name, "deviation": deviation, "power": round(power, 4)}
    right = power >= planned - 2 * _error(planned, options.draws)
    if null is not None:
        most = 1.5 * options.alpha
        row["false_alarms"] = round(float(null[0].mean()), 4)
        right &= null[0].mean() <= most + 2 * _error(most, options.draws)
    row["undecided"] = round(float((~lossy[0] & ~lossy[1]).mean()), 4)
    row["segments"] = round(float(lossy[2].mean()))
    sys.stdout.write(json.dumps({**row, "right": bool(right)}) + "\n")
    sys.stdout.flush()
    return bool(right)


def _error(share: float, draws: int) -> float:
    return math.sqrt(share * (1 - share) / draws)


if __name__ == "__main__":
    sys.exit(main())

"""Bound on the share of steps that can be located within ±5 nights if the noise model is known.

Also prints the results of the level model on the same kinds of noise.

Two oracles know the sigma and the AR(1) coefficient of Gaussian noise; series and steps are those
of `retrospective.py`. Each chooses the location whose ±5 nights contain most of the posterior. The
first also knows the levels: no detector can do better. The second estimates levels, and a drift, by
least squares of whitened values.
    python benchmarks/verdicts/location_bound.py [--series 1000]
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from flexq_bench.stats.steps import HISTORY_RULES
from numpy.typing import NDArray
from retrospective import MAX_DISTANCE, SERIES_LENGTH, SIGMA, STEP_AT, STEPS, with_step

from flexq_bench.stats.level_model import level_model

Floats = NDArray[np.float64]

_MARGIN_NIGHTS = 10  # at either end, without a step


def whitened(columns: Floats, memory: float) -> Floats:
    """[n, k] of which AR(1) noise has become independent."""
    rest = columns - memory * np.roll(columns, 1, axis=0)
    rest[0] = columns[0] * np.sqrt(1 - memory**2)
    return rest


def most_held(log_posterior: Floats) -> int:
    """Index of the place whose ±5 nights hold most of a posterior [k]."""
    posterior = np.exp(log_posterior - log_posterior.max())
    return int(np.convolve(posterior, np.ones(2 * MAX_DISTANCE + 1), "same").argmax())


def shares(memory: float, slope: float, step: float, series: int) -> tuple[float, float]:
    """Shares of series whose step is placed within ±5 nights, by either oracle."""
    rng = np.random.default_rng(round(1e4 * step) + round(100 * memory))
    places = np.arange(_MARGIN_NIGHTS, SERIES_LENGTH - _MARGIN_NIGHTS)
    time = np.arange(SERIES_LENGTH)
    after = (time[:, None] >= places).astype(np.float64)
    known = whitened(np.log1p(step) * after, memory)
    sigma = SIGMA * np.sqrt(1 - memory**2)
    nuisance = (
        np.ones((SERIES_LENGTH, 1))
        if not slope
        else np.stack([np.ones(SERIES_LENGTH), time / SERIES_LENGTH], axis=1)
    )
    basis, _ = np.linalg.qr(whitened(nuisance, memory))
    free = whitened(after, memory)
    free -= basis @ (basis.T @ free)
    weights = np.sqrt((free * free).sum(axis=0))
    free /= weights
    located = estimated = 0
    for _ in range(series):
        innovations = sigma * rng.standard_normal(SERIES_LENGTH)
        innovations += known[:, STEP_AT - _MARGIN_NIGHTS]
        log_posterior = -((innovations[:, None] - known) ** 2).sum(axis=0) / (2 * sigma**2)
        located += abs(int(places[most_held(log_posterior)]) - STEP_AT) <= MAX_DISTANCE
        log_posterior = (free.T @ innovations) ** 2 / (2 * sigma**2) - np.log(weights)
        estimated += abs(int(places[most_held(log_posterior)]) - STEP_AT) <= MAX_DISTANCE
    return located / series, estimated / series


def detected_shares(kind: str, step: float, series: int) -> tuple[float, float, float, float]:
    """Shares of series whose step is found within ±5 nights, within ±10, at all; or a drift is."""
    near = around = anywhere = drifting = 0
    for number in range(series):
        model = level_model(20 * np.exp(with_step(kind, step, number)), HISTORY_RULES)
        apart = [abs(step_found.index - STEP_AT) for step_found in model.steps]
        near += any(nights <= MAX_DISTANCE for nights in apart)
        around += any(nights <= 2 * MAX_DISTANCE for nights in apart)
        anywhere += bool(apart)
        drifting += not apart and bool(model.drifts)
    return near / series, around / series, anywhere / series, drifting / series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=1000)
    series = parser.parse_args().series
    out = sys.stdout.write
    out("| noise | step | levels and noise known | noise known | found within ±5 | within ±10 |")
    out(" at all | a drift instead |\n| --- |" + " ---: |" * 7 + "\n")
    for name, memory, slope in (
        ("independent", 0.0, 0.0),
        ("AR(1) 0.5", 0.5, 0.0),
        ("drift 0.1 % a night", 0.0, 0.001),
    ):
        for step in STEPS:
            located, estimated = shares(memory, slope, step, series)
            out(f"| {name} | {step:.0%} | {located:.1%} | {estimated:.1%} |")
            detected = detected_shares(name, step, series)
            out("".join(f" {share:.1%} |" for share in detected) + "\n")


if __name__ == "__main__":
    main()

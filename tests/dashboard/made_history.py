"""Random histories with known levels: nights of several series, with noise from run to run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from made_results import COMMIT, H200, a_record, a_run

from flexq_bench.db.queries import HistoryPoint, ResultRow, SeriesName
from flexq_bench.db.records import Record
from flexq_bench.results.stored_noise import StoredNoise

KERNELS = ("cublaslt-w8a8", "flexq-w6a6", "abq-w6a6")
SHAPES = (("llama-7b", "o_proj", 4096, 4096), ("llama-7b", "down_proj", 4096, 11008))
TOKENS = (1, 8)
FIRST = datetime(2025, 3, 1, 22, tzinfo=UTC)
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Made:
    """levels: by night and series, µs. medians, ends and floors: what the nights measured."""

    series: list[tuple[str, str, str, int, int, int]]  # kernel, model, layer, n, k, m
    levels: np.ndarray  # [nights, series]
    floors: np.ndarray  # [series], the true ones
    medians: np.ndarray  # [nights, series]
    measured_floors: np.ndarray  # [nights, series]
    within: float  # ln, sigma that each run knows its own time to

    @property
    def nights(self) -> int:
        return len(self.medians)

    def at(self, night: int) -> datetime:
        return FIRST + timedelta(days=night)

    def sha(self, night: int) -> str:
        return f"{night + 1:010x}" + "a" * 30

    def run(self, night: int) -> Any:
        created_at = self.at(night).isoformat()
        return a_run(f"night {night}", suite="nightly", trigger="nightly", created_at=created_at)

    def ends(self, night: int, series: int) -> tuple[float, float]:
        half = _NORMAL_95 * self.within
        median = float(self.medians[night, series])
        return median * math.exp(-half), median * math.exp(half)


def made(seed: int) -> Made:
    """Draw a history: noise of runs, of cases in a run and of samples.

    Every third history has a step of one kernel.
    """
    rng = np.random.default_rng(seed)
    series = [(kernel, *shape, m) for kernel in KERNELS for shape in SHAPES for m in TOKENS]
    nights = int(rng.integers(12, 31))
    base = rng.uniform(5.0, 50.0, len(series))
    levels = np.tile(base, (nights, 1))
    if seed % 3 == 0:
        slower = np.array([kernel == KERNELS[1] for kernel, *_ in series])
        levels[int(rng.integers(2, nights - 1)) :, slower] *= math.exp(rng.uniform(-0.1, 0.1))
    shared, own = rng.uniform(0.0, 0.008), rng.uniform(0.001, 0.008)
    within = float(rng.uniform(0.0005, 0.003))
    of_run = rng.normal(0, shared, (nights, 1))
    noise = of_run + rng.normal(0, own, levels.shape) + rng.normal(0, within, levels.shape)
    floors = base * rng.uniform(0.3, 0.9, len(series))
    measured = floors * np.exp(of_run + rng.normal(0, own, levels.shape))
    return Made(series, levels, floors, levels * np.exp(noise), measured, within)


def records(history: Made) -> list[Record]:
    """Return all results as records to import."""
    stored = []
    for night in range(history.nights):
        commit = replace(
            COMMIT, sha=history.sha(night), topo_order=night + 1, subject=f"Change {night + 1}"
        )
        for i, (kernel, model, layer, n, k, m) in enumerate(history.series):
            low, high = history.ends(night, i)
            median = float(history.medians[night, i])
            stored.append(
                a_record(
                    history.run(night), kernel=kernel, model=model, layer=layer, n=n, k=k, m=m,
                    median_us=median, ci_low_us=low, ci_high_us=high,
                    tops=2e-6 * m * n * k / median,
                    floor_us=float(history.measured_floors[night, i]), commit=commit,
                    created_at=(history.at(night) + timedelta(seconds=i)).isoformat(),
                )
            )  # fmt: skip
    return stored


def names(history: Made) -> list[SeriesName]:
    return [
        SeriesName(
            i, kernel, 1, "", "cuda", "gemm", "cold", "time", "us", "linear",
            f"m={m} n={n} k={k}", m, n, k, 1, H200, "",
        )
        for i, (kernel, _, _, n, k, m) in enumerate(history.series)
    ]  # fmt: skip


def noise_of(history: Made) -> StoredNoise:
    """Return the stored noise of the history's series."""
    points = {
        i: [
            HistoryPoint(
                history.sha(night), night + 1, 1, f"run {night}", f"{night} {i}", history.at(night),
                float(history.medians[night, i]), *history.ends(night, i),
                float(history.measured_floors[night, i]), None,
            )
            for night in range(history.nights)
        ]
        for i in range(len(history.series))
    }  # fmt: skip
    return StoredNoise(points)


def results(history: Made, night: int) -> list[ResultRow]:
    """Return the results of one run."""
    return [
        ResultRow(
            f"{night} {i}", f"run {night}", "nightly", f"case {i}", i, kernel, "", "cuda", "gemm",
            "cold", H200, model, layer, "linear", f"m={m} n={n} k={k}", m, n, k, 6, 6, "ok", "",
            True,
            float(history.medians[night, i]), *history.ends(night, i), 50,
            float(history.measured_floors[night, i]), None, 1.5, 1.0, 0.0, True, {},
            history.sha(night), False, history.at(night), 1, "boost",
        )
        for i, (kernel, model, layer, n, k, m) in enumerate(history.series)
    ]  # fmt: skip

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
        at = self.at(night).isoformat()
        return a_run(f"night {night}", suite="nightly", trigger="nightly", created_at=at)

    def ends(self, night: int, one: int) -> tuple[float, float]:
        half = _NORMAL_95 * self.within
        median = float(self.medians[night, one])
        return median * math.exp(-half), median * math.exp(half)


def made(seed: int) -> Made:
    """What moves a run as a whole, what moves a case in it, what its samples leave unknown, and in
    every third history a step of one kernel."""
    rng = np.random.default_rng(seed)
    series = [(kernel, *shape, m) for kernel in KERNELS for shape in SHAPES for m in TOKENS]
    nights = int(rng.integers(12, 31))
    base = rng.uniform(5.0, 50.0, len(series))
    levels = np.tile(base, (nights, 1))
    if seed % 3 == 0:
        slower = np.array([one[0] == KERNELS[1] for one in series])
        levels[int(rng.integers(2, nights - 1)) :, slower] *= math.exp(rng.uniform(-0.1, 0.1))
    shared, own = rng.uniform(0.0, 0.008), rng.uniform(0.001, 0.008)
    within = float(rng.uniform(0.0005, 0.003))
    of_run = rng.normal(0, shared, (nights, 1))
    noise = of_run + rng.normal(0, own, levels.shape) + rng.normal(0, within, levels.shape)
    floors = base * rng.uniform(0.3, 0.9, len(series))
    measured = floors * np.exp(of_run + rng.normal(0, own, levels.shape))
    return Made(series, levels, floors, levels * np.exp(noise), measured, within)


def records(of: Made) -> list[Record]:
    """Everything, as records to import."""
    found = []
    for night in range(of.nights):
        commit = replace(
            COMMIT, sha=of.sha(night), topo_order=night + 1, subject=f"Change {night + 1}"
        )
        for i, (kernel, model, layer, n, k, m) in enumerate(of.series):
            low, high = of.ends(night, i)
            found.append(
                a_record(
                    of.run(night), kernel=kernel, model=model, layer=layer, n=n, k=k, m=m,
                    median_us=float(of.medians[night, i]), ci_low_us=low, ci_high_us=high,
                    floor_us=float(of.measured_floors[night, i]), commit=commit,
                    created_at=(of.at(night) + timedelta(seconds=i)).isoformat(),
                )
            )  # fmt: skip
    return found


def names(of: Made) -> list[SeriesName]:
    return [
        SeriesName(i, kernel, 1, "", "cuda", "gemm", "cold", "time", "us", m, n, k, 1, H200, "")
        for i, (kernel, _, _, n, k, m) in enumerate(of.series)
    ]


def noise_of(of: Made) -> StoredNoise:
    """What the database would tell of its series."""
    points = {
        i: [
            HistoryPoint(
                of.sha(night), night + 1, 1, f"run {night}", f"{night} {i}", of.at(night),
                float(of.medians[night, i]), *of.ends(night, i),
                float(of.measured_floors[night, i]), None,
            )
            for night in range(of.nights)
        ]
        for i in range(len(of.series))
    }  # fmt: skip
    return StoredNoise(points)


def results(of: Made, night: int) -> list[ResultRow]:
    """What one run measured."""
    return [
        ResultRow(
            f"{night} {i}", f"run {night}", "nightly", f"case {i}", i, kernel, "", "cuda", "gemm",
            "cold", H200, model, layer, m, n, k, 6, 6, "ok", "", True,
            float(of.medians[night, i]), *of.ends(night, i), 50,
            float(of.measured_floors[night, i]), None, 1.5, 1.0, 0.0, True, {}, of.sha(night),
            False, of.at(night), 1, "boost",
        )
        for i, (kernel, model, layer, n, k, m) in enumerate(of.series)
    ]  # fmt: skip

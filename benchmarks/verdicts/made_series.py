"""Synthetic labelled series like those of a CI, of families that no rule was tuned on.

Steps of 0.5 to 50 % in both directions, with disturbances: noise that depends on the level, heavy
tails, autocorrelation, skew, ticks, weekly patterns, trends, bursts of outliers. The labels are the
generated steps.

SHAPES are levels that return, settle or are interrupted, in Gaussian noise: reverted commits, a
device with two clocks, a cache that warms up.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

_MIN_SEGMENT_LENGTH = 12  # values between two steps
_MEAN_EXTRA_LENGTH = 80  # of a segment, values


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _steps(rng: np.random.Generator, size: int) -> tuple[Floats, list[int]]:
    """ln levels [size], and the indices where they change."""
    places: list[int] = []
    index = _MIN_SEGMENT_LENGTH + int(rng.exponential(_MEAN_EXTRA_LENGTH))
    while index < size - _MIN_SEGMENT_LENGTH:
        places.append(index)
        index += _MIN_SEGMENT_LENGTH + int(rng.exponential(_MEAN_EXTRA_LENGTH))
    jumps = np.exp(rng.uniform(np.log(0.005), np.log(0.5), len(places)))
    jumps *= rng.choice([-1, 1], len(places))
    levels = np.zeros(size)
    for place, jump in zip(places, jumps, strict=True):
        levels[place:] += jump
    return levels, places


def _moving(rng: np.random.Generator, size: int) -> Floats:
    """ARMA(1, 1): memory that the first neighbour understates."""
    drawn = rng.standard_normal(size + 1)
    noise = drawn[1:] - 0.5 * drawn[:-1]
    for index in range(1, size):
        noise[index] += 0.85 * noise[index - 1]
    return noise / float(noise.std() or 1)


def _bursts(rng: np.random.Generator, size: int) -> Floats:
    noise = rng.standard_normal(size)
    for start in rng.integers(0, size, size=max(size // 70, 1)):
        length = int(rng.integers(1, 4))
        noise[start : start + length] += rng.uniform(4, 25) * rng.choice([-1, 1])
    return noise


def _weeks(rng: np.random.Generator, size: int) -> Floats:
    weekend = (np.arange(size) + rng.integers(7)) % 7 >= 5
    return rng.standard_normal(size) - 1.5 * weekend


def _changing(rng: np.random.Generator, size: int) -> Floats:
    noise = rng.standard_normal(size)
    for start in rng.integers(0, size, size=max(size // 120, 1)):
        noise[start : start + int(rng.integers(20, 90))] *= rng.uniform(0.2, 5)
    return noise


NOISES: dict[str, Draw] = {
    "Laplace": lambda rng, size: rng.laplace(0, 0.7, size),
    "t(2.5)": lambda rng, size: rng.standard_t(2.5, size) / 2,
    "skewed (gamma)": lambda rng, size: rng.gamma(1.5, 0.8, size),
    "ARMA(1, 1)": _moving,
    "bursts of outliers": _bursts,
    "weekends": _weeks,
    "noise that changes": _changing,
    "a third in another mode": lambda rng, size: (
        rng.standard_normal(size) + 9 * (rng.random(size) < 0.3)
    ),
}


def made_series(noise: str, number: int) -> tuple[Floats, list[int]]:
    """A series of positive values and its labels; by the noise and a number, always the same."""
    rng = np.random.default_rng(zlib.crc32(f"made {noise} {number}".encode()))
    size = int(rng.integers(50, 800))
    levels, places = _steps(rng, size)
    sigma = _log_uniform(rng, 0.001, 0.03)
    logs = levels + sigma * NOISES[noise](rng, size)
    if number % 4 == 1:
        logs += rng.uniform(-0.5, 0.5) * np.arange(size) / size
    values = float(np.exp(rng.uniform(0, 9))) * np.exp(logs)
    if number % 4 == 2:
        tick = float(np.median(values)) * sigma * rng.uniform(0.5, 4)
        values = np.maximum(np.round(values / tick), 1) * tick
    return values, places


def _two_levels(rng: np.random.Generator, size: int, sigma: float) -> tuple[Floats, list[int]]:
    """Visits of 8 to 90 values to either of two levels, 5 to 15 sigma apart."""
    places: list[int] = []
    index = int(_log_uniform(rng, 8, 90))
    while index < size - 4:
        places.append(index)
        index += int(_log_uniform(rng, 8, 90))
    upper = np.searchsorted(places, np.arange(size), side="right") % 2
    return float(rng.uniform(5, 15)) * sigma * upper.astype(np.float64), places


def _reverts(rng: np.random.Generator, size: int, sigma: float) -> tuple[Floats, list[int]]:
    """Every 60 values or so a step of 5 sigma to 30 %, undone after 4 to 30 values."""
    levels, places = np.zeros(size), []
    index = 10 + int(rng.exponential(60))
    while index < size - 34:
        length = int(rng.integers(4, 31))
        jump = _log_uniform(rng, 5 * sigma, 0.3) * rng.choice([-1, 1])
        levels[index : index + length] += jump
        places += [index, index + length]
        index += length + 10 + int(rng.exponential(60))
    return levels, places


def _warming(rng: np.random.Generator, size: int, sigma: float) -> tuple[Floats, list[int]]:
    """Steps of 0.5 to 50 %, 20 to 50 % of some of which comes or goes over 3 to 15 values."""
    levels, places = _steps(rng, size)
    settling = levels.copy()
    for index in places:
        if rng.random() < 0.6:
            fading = np.exp(-np.arange(size - index) / rng.uniform(3, 15))
            share = rng.uniform(0.2, 0.5) * rng.choice([-1, 1])
            settling[index:] += share * (levels[index] - levels[index - 1]) * fading
    return settling, places


def _dips(rng: np.random.Generator, size: int, sigma: float) -> tuple[Floats, list[int]]:
    """Steps, half of them as large as dips of one to three values, which begin at 3 %."""
    levels, places = _steps(rng, size)
    depth = rng.uniform(6, 20) * sigma
    for index in places:
        if rng.random() < 0.5:
            levels[index:] += rng.choice([-1, 1]) * depth - (levels[index] - levels[index - 1])
    dips = np.zeros(size)
    for start in np.flatnonzero(rng.random(size) < 0.03):
        dips[start : start + int(rng.integers(1, 4))] = depth
    return levels - dips, places


Shape = Callable[[np.random.Generator, int, float], tuple[Floats, list[int]]]

SHAPES: dict[str, Shape] = {
    "two levels, visits of 8 to 90": _two_levels,
    "reverted steps": _reverts,
    "levels that settle": _warming,
    "dips as large as steps": _dips,
}


def made_shape(shape: str, number: int) -> tuple[Floats, list[int]]:
    """A series of 60 to 1,000 positive values and its labels; by number, always the same."""
    rng = np.random.default_rng(zlib.crc32(f"shape {shape} {number}".encode()))
    size = int(_log_uniform(rng, 60, 1000))
    sigma = _log_uniform(rng, 0.002, 0.02)
    levels, places = SHAPES[shape](rng, size, sigma)
    return np.exp(levels + sigma * rng.standard_normal(size)), places

"""Synthetic series like those of a database's CI, marked by three to five simulated annotators.

The series are long, with wandering, returning and short levels, heavy tails, two modes and changing
noise. A simulated annotator marks what is visible in a plot: steps that are large compared with the
noise, some excursions, and occasionally no change at all; annotators differ slightly. No rule was
tuned on series of odd index.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Step = tuple[int, float, int]  # index, size in sigmas, values that it holds for

_MAX_LENGTH, _MIN_LENGTH, _MIN_LONG_LENGTH = 1100, 40, 120
_SHORT_SHARE = 0.35
# Size of a step that half of the annotators mark, once it holds for 12 values.
_VISIBLE_SIGMAS = 2.6
_VISIBLE_SPREAD = 0.4
_VALUES_PER_FALSE_MARK = 800  # of an annotator, on average


def annotated_series(number: int) -> tuple[Floats, dict[str, list[int]]]:
    """Values of any sign and scale, and marks by annotator; by the number, always the same."""
    rng = np.random.default_rng(zlib.crc32(f"annotated {number}".encode()))
    is_short = rng.random() < _SHORT_SHARE
    low, high = (_MIN_LENGTH, _MIN_LONG_LENGTH) if is_short else (_MIN_LONG_LENGTH, _MAX_LENGTH)
    size = int(rng.integers(low, high))
    levels, steps = _levels(rng, size)
    sigmas = _sigmas(rng, size)
    noise = sigmas * _noise(rng, size)
    added, excursions = _excursions(rng, size)
    values = levels + noise + added
    steps += excursions
    marks = {
        f"annotator {annotator}": _marks(rng, steps, sigmas, size)
        for annotator in range(int(rng.integers(3, 6)))
    }
    return _in_units(rng, values), marks


def _levels(rng: np.random.Generator, size: int) -> tuple[Floats, list[Step]]:
    """Levels [size] in sigmas, and their steps, each with the length of its shorter side."""
    between = float(np.exp(rng.uniform(np.log(40), np.log(500))))
    places: list[int] = []
    index = 5 + int(rng.exponential(between))
    while index < size - 4:
        places.append(index)
        index += 4 + int(rng.exponential(between))
    scale = float(np.exp(rng.normal(np.log(4.5), 0.6)))
    known = [0.0]
    levels = np.zeros(size)
    for place in places:
        back = len(known) > 1 and rng.random() < 0.35
        jump = scale * np.exp(rng.normal(0, 0.7)) * rng.choice([-1, 1])
        known.append(known[-2] if back else known[-1] + float(jump))
        levels[place:] = known[-1]
    bounds = [0, *places, size]
    steps = [
        (place, known[i + 1] - known[i], min(place - bounds[i], bounds[i + 2] - place))
        for i, place in enumerate(places)
    ]
    return levels, steps


def _sigmas(rng: np.random.Generator, size: int) -> Floats:
    sigmas = np.ones(size)
    if rng.random() < 0.3:
        for start in rng.integers(0, size, size=1 + size // 250):
            sigmas[start : start + int(rng.integers(20, 150))] *= rng.uniform(0.4, 2.5)
    return sigmas


def _noise(rng: np.random.Generator, size: int) -> Floats:
    kind = int(rng.integers(6))
    if kind == 0:
        noise = rng.standard_normal(size)
    elif kind == 1:
        noise = rng.standard_t(3, size) / np.sqrt(3)
    elif kind == 2:
        noise = (rng.gamma(1.5, 1, size) - 1.5) / np.sqrt(1.5)
    elif kind == 3:
        noise = 0.6 * rng.standard_normal(size) + rng.uniform(2, 6) * (
            rng.random(size) < rng.uniform(0.05, 0.5)
        )
        noise = noise / noise.std()
    else:
        noise = rng.standard_normal(size)
        memory = float(rng.uniform(0.2, 0.7))
        for index in range(1, size):
            noise[index] = memory * noise[index - 1] + np.sqrt(1 - memory**2) * noise[index]
    if rng.random() < 0.4:
        wander = np.cumsum(rng.standard_normal(size))
        wander = (wander - wander.mean()) / max(float(wander.std()), 1e-9)
        noise = noise + rng.uniform(0.2, 0.8) * wander
    return np.asarray(noise, dtype=np.float64)


def _excursions(rng: np.random.Generator, size: int) -> tuple[Floats, list[Step]]:
    """Single outliers, and a few values elsewhere: two steps for those who see them so."""
    added, steps = np.zeros(size), []
    one_sided = rng.choice([-1, 1])
    for index in np.flatnonzero(rng.random(size) < rng.choice([0, 0.003, 0.01])):
        length = int(rng.choice([1, 1, 1, 1, 2, 3, 8]))
        side = one_sided if rng.random() < 0.8 else -one_sided
        jump = float(side * rng.uniform(4, 20))
        added[index : index + length] += jump
        if length > 2:
            steps += [(int(index), jump, length), (int(index) + length, -jump, length)]
    return added, [step for step in steps if step[0] < size]


def _marks(rng: np.random.Generator, steps: list[Step], sigmas: Floats, size: int) -> list[int]:
    eye = _VISIBLE_SIGMAS * float(np.exp(rng.normal(0, 0.35)))
    marks: set[int] = set()
    for index, jump, holds in steps:
        noise = float(np.mean(sigmas[max(index - 30, 0) : index + 30]))
        seen = abs(jump) / noise * min(1.0, np.sqrt(holds / 12))
        if np.log(seen / eye) / _VISIBLE_SPREAD + rng.logistic(0, 1.0) > 0:
            marks.add(
                int(np.clip(index + round(rng.normal(0, 0.4 + 2 / max(seen, 1))), 1, size - 1))
            )
    for _ in range(int(rng.poisson(size / _VALUES_PER_FALSE_MARK))):
        marks.add(int(rng.integers(1, size)))
    return sorted(marks)


def _in_units(rng: np.random.Generator, values: Floats) -> Floats:
    """Times, rates, or values about zero; some in few distinct ones."""
    share = float(np.exp(rng.uniform(np.log(0.002), np.log(0.08))))  # sigma of the level
    scale = float(np.exp(rng.uniform(-3, 12)))
    is_signed = rng.random() < 0.1
    made = scale * (values if is_signed else np.maximum(1 + share * values, 0.02))
    if rng.random() < 0.2:
        tick = float(np.median(np.abs(np.diff(made)))) * rng.uniform(0.3, 2) or 1.0
        made = np.round(made / tick) * tick
    return np.asarray(made, dtype=np.float64)

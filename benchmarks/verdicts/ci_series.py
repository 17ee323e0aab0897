"""Synthetic series of a CI by kind of noise, marked by three to five simulated annotators.

Independent of `annotated_series.py` and `made_series.py`: levels in arbitrary units, steps of 0.5
to 200 % at short distances, excursions, ramps, plateaus of a trend; noise of 0.2 to 10 %. An
annotator marks a change that is large compared with the noise near it and with the height of the
plot. Detectors were developed on the kinds of DEVELOPMENT, not on those of HELD_OUT.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Floats]

_SHORT_LENGTHS = (40, 200)  # values
_LONG_LENGTHS = (500, 2000)
_CHANGES = ("none", "sparse", "sparse", "several", "close", "excursions", "ramps", "plateau", "all")
_VISIBLE_SIGMAS = 2.2  # size of a change that half of the annotators see
_VISIBLE_SHARE = 0.025  # of the plot's height, the same
_SHARPNESS = 4.0  # of both, of a logistic curve over the logarithm
# Fewer values are not marked by 40 % of the annotators, fewer than 3 by nobody.
_MIN_VISIBLE_LENGTH = 9
_VALUES_PER_FALSE_MARK = 2500  # of an annotator, on average


@dataclass(frozen=True, slots=True)
class _Change:
    """index: of its middle. jump: of the logarithm, 0: a trend begins. length: values."""

    index: int
    jump: float
    length: int = 0


def _between(rng: np.random.Generator, low: float, high: float) -> float:
    """Log-uniform."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _side(rng: np.random.Generator) -> float:
    return float(rng.choice([-1, 1]))


# Noise, in units of sigma.


def _gaussian(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size)


def _arma(rng: np.random.Generator, size: int, past: tuple[float, ...], ma: float = 0.0) -> Floats:
    drawn = rng.standard_normal(size + 100)
    noise = drawn.copy()
    noise[1:] += ma * drawn[:-1]
    for index in range(len(past), noise.size):
        for lag, weight in enumerate(past, 1):
            noise[index] += weight * noise[index - lag]
    return noise[100:] / float(noise[100:].std() or 1)


def _arma21(rng: np.random.Generator, size: int) -> Floats:
    past = (rng.uniform(0.3, 0.7), rng.uniform(-0.3, 0.2))
    return _arma(rng, size, past, rng.uniform(-0.4, 0.4))


def _lognormal(rng: np.random.Generator, size: int) -> Floats:
    hit = rng.random(size) < rng.uniform(0.01, 0.08)
    return rng.standard_normal(size) + _side(rng) * hit * rng.lognormal(1.2, 0.8, size)


def _wander(rng: np.random.Generator, size: int) -> Floats:
    slow = _arma(rng, size, (rng.uniform(0.93, 0.99),))
    return rng.standard_normal(size) + rng.uniform(0.3, 1.0) * slow


def _volatile(rng: np.random.Generator, size: int) -> Floats:
    return rng.standard_normal(size) * np.exp(0.6 * _arma(rng, size, (0.95,)))


def _weekday(rng: np.random.Generator, size: int) -> Floats:
    pattern = rng.standard_normal(7)
    days = (np.arange(size) + rng.integers(7)) % 7
    noise: Floats = rng.uniform(0.5, 2) * (pattern - pattern.mean())[days]
    noise += rng.standard_normal(size)
    return noise


def _spikes(rng: np.random.Generator, size: int) -> Floats:
    noise = rng.standard_normal(size)
    for index in np.flatnonzero(rng.random(size) < _between(rng, 0.003, 0.04)):
        noise[index : index + int(rng.integers(1, 3))] += _side(rng) * _between(rng, 5, 60)
    return noise


def _cauchy(rng: np.random.Generator, size: int) -> Floats:
    is_wild = rng.random(size) < rng.uniform(0.02, 0.2)
    wild = np.clip(rng.standard_cauchy(size), -80, 80)
    return np.where(is_wild, wild, rng.standard_normal(size))


def _regimes(rng: np.random.Generator, size: int) -> Floats:
    sigma, index = np.ones(size), 0
    while index < size:
        length = int(rng.integers(15, 200))
        sigma[index : index + length] = _between(rng, 0.3, 4)
        index += length
    return rng.standard_normal(size) * sigma / float(np.median(sigma))


def _long_memory(rng: np.random.Generator, size: int) -> Floats:
    """Fractionally integrated."""
    order, weights = rng.uniform(0.1, 0.35), np.ones(200)
    for lag in range(1, 200):
        weights[lag] = weights[lag - 1] * (lag - 1 + order) / lag
    noise = np.convolve(rng.standard_normal(size + 200), weights)[200 : 200 + size]
    return noise / float(noise.std())


def _three_modes(rng: np.random.Generator, size: int) -> Floats:
    modes = [0, rng.uniform(3, 6), rng.uniform(6, 14)]
    return rng.standard_normal(size) + _side(rng) * rng.choice(modes, size, p=[0.75, 0.15, 0.1])


def _walks(rng: np.random.Generator, size: int) -> Floats:
    """One to three stretches of a random walk."""
    steps = np.zeros(size)
    for _ in range(int(rng.integers(1, 4))):
        start = int(rng.integers(0, size))
        stretch = steps[start : start + int(rng.integers(20, 150))]
        stretch += rng.standard_normal(stretch.size) * rng.uniform(0.1, 0.35)
    return rng.standard_normal(size) + np.cumsum(steps)


def _two_hosts(rng: np.random.Generator, size: int) -> Floats:
    """Each night on one of two, that differ by 1 to 6 sigma and in their noise."""
    on_other = rng.random(size) < rng.uniform(0.2, 0.8)
    sigma = np.where(on_other, 1, rng.uniform(0.3, 1))
    return rng.standard_normal(size) * sigma + on_other * rng.uniform(1, 6)


def _skewed(rng: np.random.Generator, size: int) -> Floats:
    shape = rng.uniform(0.6, 2)
    drawn: Floats = rng.gamma(shape, 1, size)
    return (drawn - shape) / float(np.sqrt(shape)) * float(rng.choice([-1, 1, 1]))


def _waves(rng: np.random.Generator, size: int) -> Floats:
    turns = np.arange(size) / int(rng.choice([5, 12, 24, 30])) + rng.random()
    return rng.standard_normal(size) + rng.uniform(0.4, 1.5) * np.sin(2 * np.pi * turns)


STICKY, TICKS, WITH_LEVEL = "sticky modes", "ticks", "noise that grows with the level"
GAPS, INTEGERS = "zeros and gaps", "integers"
DEVELOPMENT: dict[str, Draw] = {
    "Gaussian": _gaussian,
    "lognormal outliers": _lognormal,
    "ARMA(2, 1)": _arma21,
    STICKY: _gaussian,
    "levels that wander": _wander,
    "clusters of loud noise": _volatile,
    "weekdays": _weekday,
    "uniform": lambda rng, size: rng.uniform(-1.7, 1.7, size),
    "spikes": _spikes,
    TICKS: _gaussian,
    WITH_LEVEL: _gaussian,
}
HELD_OUT: dict[str, Draw] = {
    "Cauchy outliers": _cauchy,
    "regimes of noise": _regimes,
    "long memory": _long_memory,
    "three modes": _three_modes,
    "stretches of a random walk": _walks,
    "Student t": lambda rng, size: rng.standard_t(rng.uniform(2.2, 5), size),
    "two hosts": _two_hosts,
    "skewed": _skewed,
    "waves": _waves,
    GAPS: _gaussian,
    INTEGERS: _gaussian,
}


def ci_series(kind: str, number: int) -> tuple[Floats, dict[str, list[int]]]:
    """Values of any sign and scale (NaN: a gap) and marks by annotator; of a number the same ones.

    Numbers that three divides are of 40 to 200 values, the others of 500 to 2,000.
    """
    rng = np.random.default_rng(zlib.crc32(f"CI {kind} {number}".encode()))
    size = int(_between(rng, *(_LONG_LENGTHS if number % 3 else _SHORT_LENGTHS)))
    logs, changes = _levels(rng, size)
    sigma = _between(rng, *((0.002, 0.1) if rng.random() < 0.5 else (0.01, 0.05)))
    levels = np.exp(logs)
    noise = sigma * {**DEVELOPMENT, **HELD_OUT}[kind](rng, size)
    if kind == STICKY:
        visits = 1 + sigma * _visits(rng, size)
        hops = np.flatnonzero(np.diff(visits)) + 1
        changes += [_Change(int(hop), float(np.log(visits[hop] / visits[hop - 1]))) for hop in hops]
        changes.sort(key=lambda change: change.index)
        levels = levels * visits
    if kind == WITH_LEVEL:
        noise *= levels ** rng.uniform(-1.5, 1.5)
    values = levels * np.maximum(1 + noise, 0.01)
    scale = float(rng.choice([1.0, 1e-9, 1e9, _between(rng, 1e-3, 1e6)]))
    if kind == TICKS:
        tick = sigma * _between(rng, 1, 6)
        values = np.round(values / tick) * tick
    elif kind == INTEGERS:
        scale = 1.0
        counts = _between(rng, 15, 300)
        values, levels = np.round(values * counts), levels * counts
    elif kind == GAPS:
        values[rng.random(size) < rng.uniform(0, 0.03)] = 0.0
    marks = _marks(rng, levels, values, changes)
    if kind == GAPS:
        values[rng.random(size) < rng.uniform(0, 0.15)] = np.nan
    sign = rng.random()
    if sign < 0.08:
        values = values - float(np.nanmedian(values)) * rng.uniform(0.5, 2)
    elif sign < 0.13:
        values = -values
    return scale * values, marks


def _visits(rng: np.random.Generator, size: int) -> Floats:
    """Visits to a mode 3 to 10 sigma away: chances of 0.5 to 15 % to come and 2 to 50 % to go."""
    come, go = _between(rng, 0.005, 0.15), _between(rng, 0.02, 0.5)
    upper, is_upper = np.zeros(size), False
    for index in range(size):
        is_upper ^= bool(rng.random() < (go if is_upper else come))
        upper[index] = is_upper
    return _side(rng) * rng.uniform(3, 10) * upper


def _levels(rng: np.random.Generator, size: int) -> tuple[Floats, list[_Change]]:
    """ln levels [size], and their changes, oldest first."""
    logs, changes = np.zeros(size), []
    how = str(rng.choice(_CHANGES))

    def jump() -> float:
        low, high = (0.03, 0.5) if rng.random() < 0.75 else (0.005, 2.0)
        return float(np.log1p(_between(rng, low, high))) * _side(rng)

    def step(index: int) -> None:
        changes.append(_Change(index, jump()))
        logs[index:] += changes[-1].jump

    def excursion(index: int) -> None:
        back, change = index + int(rng.integers(3, 9)), jump()
        logs[index:back] += change
        changes.append(_Change(index, change))
        if back < size - 2:
            changes.append(_Change(back, -change))

    def ramp(index: int) -> None:
        length, change = min(int(rng.integers(3, 11)), size - index - 2), jump()
        logs[index:] += change * np.minimum(np.arange(1, size - index + 1) / length, 1)
        changes.append(_Change(index + length // 2, change, length))

    def trend() -> None:
        start, length = (int(rng.integers(size // a, size // b)) for a, b in ((4, 2), (8, 3)))
        logs[:] += jump() / 2 * np.clip((np.arange(size) - start) / length, 0, 1)
        changes.append(_Change(start, 0.0, length))

    def spread(fewest: int, most: int, apart: int = 12) -> list[int]:
        places: list[int] = []
        wanted = int(rng.integers(fewest, most + 1))
        for _ in range(200):
            index = int(rng.integers(8, size - 5))
            if len(places) < wanted and all(abs(index - other) >= apart for other in places):
                places.append(index)
        return places

    if how == "close":
        for index in spread(1, 3, 45):
            for _ in range(int(rng.integers(2, 4))):
                if index < size - 5:
                    step(index)
                index += int(rng.integers(5, 21))
    elif how == "all":
        for index in spread(2, 5, 25):
            (step, step, excursion, ramp)[int(rng.integers(4))](index)
    elif how != "none":
        if how == "plateau":
            trend()
        for index in {"excursions": spread(1, 3, 20), "ramps": spread(1, 3, 25)}.get(how, []):
            (excursion if how == "excursions" else ramp)(index)
        fewest, most = {"sparse": (1, 3), "several": (3, 8), "ramps": (0, 0)}.get(how, (0, 2))
        for index in spread(fewest, most):
            step(index)
    return logs, sorted(changes, key=lambda change: change.index)


def _marks(
    rng: np.random.Generator, levels: Floats, values: Floats, changes: list[_Change]
) -> dict[str, list[int]]:
    return {
        f"annotator {annotator}": _marks_of_annotator(rng, levels, values, changes)
        for annotator in range(int(rng.integers(3, 6)))
    }


def _marks_of_annotator(
    rng: np.random.Generator, levels: Floats, values: Floats, changes: list[_Change]
) -> list[int]:
    size = values.size
    eye, least = (
        middle * float(np.exp(rng.normal(0, spread)))
        for middle, spread in ((_VISIBLE_SIGMAS, 0.3), (_VISIBLE_SHARE, 0.5))
    )
    marks_excursions = rng.random() >= 0.4
    height = float(np.ptp(np.quantile(values, [0.002, 0.998])))
    bounds = [0, *(change.index for change in changes), size]
    marks = {
        int(rng.integers(1, size)) for _ in range(int(rng.poisson(size / _VALUES_PER_FALSE_MARK)))
    }
    for position, change in enumerate(changes):
        holds = min(change.index - bounds[position], bounds[position + 2] - change.index)
        if holds < (3 if marks_excursions else _MIN_VISIBLE_LENGTH):
            continue
        about = change.length / 5
        if change.jump == 0:
            is_seen, about = rng.random() < 0.25, 4.0
        else:
            before = levels[max(0, change.index - max(change.length, 1) - 1)]
            jump = abs(levels[min(size - 1, change.index + change.length)] - before)
            near = slice(max(0, change.index - 40), change.index + 40)
            seen = jump / _noise(values[near] - levels[near]) * min(1.0, np.sqrt(holds / 10))
            odds = [(max(seen, 1e-9) / eye), max(jump / height, 1e-9) / least]
            is_seen = rng.random() < float(np.prod([1 / (1 + x**-_SHARPNESS) for x in odds]))
            about += 0.5 + 1.5 / max(seen, 1.0)
        if is_seen:
            marks.add(int(np.clip(change.index + round(rng.normal(0, about)), 1, size - 1)))
    return sorted(marks)


def _noise(residuals: Floats) -> float:
    """Sigma as it is seen: of the usual values, and of the loudest tenth."""
    size = np.abs(residuals - np.median(residuals))
    return max(1.4826 * float(np.median(size)), 0.6 * float(np.quantile(size, 0.9)), 1e-9)

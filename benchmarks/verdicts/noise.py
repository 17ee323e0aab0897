"""Simulated nightly runs: kinds of noise, and their effect on an interleaved comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Floats]

SIGMA = 0.01  # ln: of a night's result, whatever the kind
PROCESS_SIGMA = 0.005  # of one process or placement; H200: offsets of 0.1-0.7 % (issue 4)
BLOCK_SIGMA = 0.002  # of one commit's half of a block; H200: 0.1-0.2 %
_SWITCH = 0.1  # chance that a sticky mode changes from one night to the next
_MODE = 0.98
_SPIKES = 0.03
_SPIKE = 4.1
_QUIET = 0.7


def _gaussian(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    return rng.standard_normal((rows, nights))


def _student(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    drawn: Floats = rng.standard_t(3, (rows, nights)) / np.sqrt(3)
    return drawn


def _autoregressive(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    noise = rng.standard_normal((rows, nights))
    noise[:, 1:] *= np.sqrt(1 - 0.6**2)
    for night in range(1, nights):
        noise[:, night] += 0.6 * noise[:, night - 1]
    return noise


def _sticky(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    switched = rng.random((rows, nights)) < _SWITCH
    switched[:, 0] = rng.random(rows) < 0.5
    mode = np.where(np.cumsum(switched, axis=1) % 2, _MODE, -_MODE)
    drawn: Floats = mode + np.sqrt(1 - _MODE**2) * rng.standard_normal((rows, nights))
    return drawn


def _spiky(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    spiked = rng.random((rows, nights)) < _SPIKES
    return _QUIET * rng.standard_normal((rows, nights)) + _SPIKE * spiked


def _heavy(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    return rng.standard_t(2, (rows, nights)) / 2  # has no standard deviation; quartiles as Gaussian


def _one_sided(rng: np.random.Generator, rows: int, nights: int) -> Floats:
    return rng.exponential(1, (rows, nights))


def _slow_share(share: float) -> Draw:
    """Some are slow, the others are not, and hardly anything is between."""

    def draw(rng: np.random.Generator, rows: int, nights: int) -> Floats:
        slow = (rng.random((rows, nights)) < share) / np.sqrt(share * (1 - share))
        noise: Floats = slow + 0.1 * rng.standard_normal((rows, nights))
        return noise

    return draw


# Each has a standard deviation of 1.
KINDS: dict[str, Draw] = {
    "Gaussian": _gaussian,
    "Student t(3)": _student,
    "AR(1) 0.6": _autoregressive,
    "sticky bimodal": _sticky,
    "3 % spikes": _spiky,
}
# What processes may differ by beyond that; the nights are Gaussian.
PROCESSES: dict[str, Draw] = {
    "a third slow": _slow_share(1 / 3),
    "15 % slow": _slow_share(0.15),
    "5 % slow": _slow_share(0.05),
    "Student t(2)": _heavy,
    "one-sided": _one_sided,
}


def nightly(kind: str, rng: np.random.Generator, rows: int, nights: int) -> Floats:
    """Logs of results, [rows, nights], about 0; Gaussian for a kind of processes."""
    return SIGMA * KINDS.get(kind, _gaussian)(rng, rows, nights)


def comparison(
    kind: str, rng: np.random.Generator, *, shift: float, pairs: int, process_sigma: float
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """Base and head times and their pair, of `pairs` process pairs with two blocks each.

    What the two share in a night (device, clocks, temperature) cancels and is left out. Each
    process of each commit draws an offset of its own, of the same kind of noise, independent of
    every other: nothing is assumed to cancel between two processes. Each half of a block scatters.
    """
    offsets = process_sigma * (KINDS | PROCESSES)[kind](rng, 2 * pairs, 1).reshape(2, pairs)
    blocks = np.repeat(offsets, 2, axis=1) + BLOCK_SIGMA * rng.standard_normal((2, 2 * pairs))
    base, head = np.exp(blocks[0]), np.exp(blocks[1] + shift)
    return base, head, np.repeat(np.arange(pairs), 2)

"""Series unlike those of the detector's development: rare modes, ticks, switches, spells.

Prints the tables that docs/statistics.md quotes, from fixed seeds (2 minutes):
    python benchmarks/verdicts/hostile.py [--kind TEXT]
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from flexq_bench.stats.change_points import change_points

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Floats]

SERIES = 50
NIGHTS = 150
STEP_AT = 80
MAX_DISTANCE = 3  # nights from a step to its change point
STEPS = (0.02, 0.05, 0.10)  # every second one is down
LENGTHS = (15, 20, 30, 40, 60)
QUIET = 0.003
TICK = 0.025


def quiet(rng: np.random.Generator, nights: int, sigma: float = QUIET) -> Floats:
    return sigma * rng.standard_normal(nights)


def rare(share: float, mode: float) -> Draw:
    """Draw for each night whether it runs in the mode."""
    return lambda rng, nights: quiet(rng, nights) + mode * (rng.random(nights) < share)


def sticky(enter: float, leave: float, mode: float) -> Draw:
    """Chances a night to go into the mode and out of it."""

    def draw(rng: np.random.Generator, nights: int) -> Floats:
        inside = rng.random() < enter / (enter + leave)
        modes = np.zeros(nights)
        for night in range(nights):
            inside ^= rng.random() < (leave if inside else enter)
            modes[night] = inside
        return quiet(rng, nights) + mode * modes

    return draw


def three_modes(rng: np.random.Generator, nights: int) -> Floats:
    modes: Floats = rng.choice([0, 0.02, 0.05], size=nights, p=[0.7, 0.2, 0.1])
    return quiet(rng, nights) + modes


def memory(phi: float) -> Draw:
    def draw(rng: np.random.Generator, nights: int) -> Floats:
        noise = rng.standard_normal(nights)
        noise[1:] *= np.sqrt(1 - phi**2)
        for night in range(1, nights):
            noise[night] += phi * noise[night - 1]
        return 0.01 * noise

    return draw


def between_ticks(rng: np.random.Generator, nights: int) -> Floats:
    """A level anywhere between two ticks of a clock."""
    return quiet(rng, nights) + float(np.log1p(TICK * (rng.random() - 0.5)))


def on_ticks(logs: Floats) -> Floats:
    """Round log times to a coarse clock's resolution, TICK; a step is rounded with them."""
    rounded: Floats = np.log(np.round(np.exp(logs) / TICK) * TICK)
    return rounded


def devices_of(rng: np.random.Generator, nights: int, stay: float) -> Ints:
    """One of four devices measures a night; stay: the chance that it is the same again."""
    device = rng.integers(4, size=nights)
    for night in range(1, nights):
        if rng.random() < stay:
            device[night] = device[night - 1]
    return device


def devices(stay: float) -> Draw:
    """Four devices with 0, +0.8, -0.8 and +2 %."""

    def draw(rng: np.random.Generator, nights: int) -> Floats:
        offsets: Floats = np.array([0, 0.008, -0.008, 0.02])[devices_of(rng, nights, stay)]
        return quiet(rng, nights, 0.002) + offsets

    return draw


def burst(rng: np.random.Generator, nights: int) -> Floats:
    """25 nights of noise seven times as large."""
    sigma = np.full(nights, QUIET)
    start = int(rng.integers(0, max(1, nights - 25)))
    sigma[start : start + 25] = 0.02
    return sigma * rng.standard_normal(nights)


def spells(rng: np.random.Generator, nights: int) -> Floats:
    """Add spells of 1 to 4 nights that are 5 % slower, every 25 nights or so."""
    slow = np.zeros(nights)
    night = int(rng.exponential(25))
    while night < nights:
        length = int(rng.integers(1, 5))
        slow[night : night + length] = 0.05
        night += length + int(rng.exponential(25)) + 1
    return quiet(rng, nights) + slow


def week(rng: np.random.Generator, nights: int) -> Floats:
    weekend = (np.arange(nights) + rng.integers(7)) % 7 >= 5
    return quiet(rng, nights) - 0.015 * weekend


def wave(rng: np.random.Generator, nights: int) -> Floats:
    return quiet(rng, nights) + 0.02 * np.sin(2 * np.pi * (np.arange(nights) / 7 + rng.random()))


def louder(rng: np.random.Generator, nights: int) -> Floats:
    """Noise three times as large from somewhere in the middle on."""
    sigma = np.where(np.arange(nights) < nights * rng.uniform(0.3, 0.7), QUIET, 3 * QUIET)
    return sigma * rng.standard_normal(nights)


def recoveries(rng: np.random.Generator, nights: int) -> Floats:
    """One night in 50 jumps by 5 to 20 %, either way, which fades over 2 to 6 nights."""
    logs = quiet(rng, nights)
    for start in np.flatnonzero(rng.random(nights) < 0.02):
        jump = rng.uniform(0.05, 0.2) * rng.choice([-1, 1])
        logs[start:] += jump * np.exp(-np.arange(nights - start) / rng.uniform(2, 6))
    return logs


def three_levels(rng: np.random.Generator, nights: int) -> Floats:
    """0, 3 or 8 %, drawn anew after 10 nights on average."""
    level = rng.integers(3, size=nights)
    for night in range(1, nights):
        if rng.random() < 0.9:
            level[night] = level[night - 1]
    offsets: Floats = np.array([0, 0.03, 0.08])[level]
    return quiet(rng, nights) + offsets


def oscillating(rng: np.random.Generator, nights: int) -> Floats:
    """AR(2), whose neighbours say little of how long it swings."""
    noise = rng.standard_normal(nights + 50)
    for night in range(2, noise.size):
        noise[night] += 1.2 * noise[night - 1] - 0.5 * noise[night - 2]
    return 0.005 * noise[50:] / float(noise.std())


def month(rng: np.random.Generator, nights: int) -> Floats:
    return quiet(rng, nights) + 0.01 * np.sin(2 * np.pi * (np.arange(nights) / 30 + rng.random()))


KINDS: dict[str, Draw] = {
    "quiet, σ 0.3 %": quiet,
    "Student t(2)": lambda rng, nights: 0.005 * rng.standard_t(2, nights),
    "one-sided (exponential)": lambda rng, nights: rng.exponential(0.01, nights),
    "10 % of nights 4 % slower": rare(0.10, 0.04),
    "15 % of nights 4 % slower": rare(0.15, 0.04),
    "20 % of nights 4 % slower": rare(0.20, 0.04),
    "15 % of nights 12 % slower": rare(0.15, 0.115),
    "35 % of nights 4 % slower": rare(0.35, 0.04),
    "three modes, 0, 2, 5 %": three_modes,
    "ticks of 2.5 %": between_ticks,
    "AR(1) 0.8": memory(0.8),
    "AR(1) 0.95": memory(0.95),
    "weekends 1.5 % faster": week,
    "a week's wave of ± 2 %": wave,
    "a month's wave of ± 1 %": month,
    "noise x 3 from halfway on": louder,
    "jumps that fade": recoveries,
    "three levels, visits of 15 nights": three_levels,
    "AR(2), σ 0.5 %": oscillating,
    "multiplicative gamma, σ 1 %": lambda rng, nights: np.log(rng.gamma(1e4, 1e-4, nights)),
    "noise x 7 for 25 nights": burst,
    "another device each night": devices(0.0),
    "another device each 10 nights": devices(0.9),
    "spells of 1 to 4 nights": spells,
    "4 % mode, visits of 3 nights": sticky(0.03, 0.3, 0.04),
    "4 % mode, visits of 20 nights": sticky(0.05, 0.05, 0.04),
    "1.2 % mode, visits of 10 nights": sticky(0.1, 0.1, 0.012),
    "1.8 % mode, visits of 10 nights": sticky(0.1, 0.1, 0.018),
}
# The same series as of the kinds without the second part. Their devices are recorded, and in the
# last the step comes with the change of device that is nearest.
RECORDED = {
    "another device each night, recorded": 0.0,
    "another device each 10 nights, recorded": 0.9,
    "another device each 10 nights, recorded, the step with a change": 0.9,
}
SHORT: dict[str, Draw] = {
    "Gaussian, σ 1 %": lambda rng, nights: quiet(rng, nights, 0.01),
    "Student t(2)": KINDS["Student t(2)"],
    "15 % of nights 4 % slower": KINDS["15 % of nights 4 % slower"],
    "ticks of 2.5 %": KINDS["ticks of 2.5 %"],
    "AR(1) 0.6": memory(0.6),
    "AR(1) 0.8": memory(0.8),
    "4 % mode, visits of 20 nights": KINDS["4 % mode, visits of 20 nights"],
}


def detected(kind: str, draw: Draw, nights: int, step: float, number: int) -> list[int]:
    rng = np.random.default_rng(zlib.crc32(f"{kind} {nights} {step} {number}".encode()))
    logs = draw(rng, nights)
    logs[STEP_AT:] += np.log1p(step) * (-1) ** number
    if draw is between_ticks:
        logs = on_ticks(logs)
    return [point.index for point in change_points(20 * np.exp(logs))]


def detected_recorded(kind: str, nights: int, step: float, number: int) -> tuple[list[int], int]:
    """The change points of a series whose devices are recorded, and where its step is."""
    same = kind.split(", ")[0]
    seed = zlib.crc32(f"{same} {nights} {step} {number}".encode())
    device = devices_of(np.random.default_rng(seed), nights, RECORDED[kind])
    logs = KINDS[same](np.random.default_rng(seed), nights)
    step_at = STEP_AT
    if kind.endswith("with a change"):
        changes = np.flatnonzero(np.diff(device)) + 1
        step_at = int(changes[np.abs(changes - STEP_AT).argmin()])
    logs[step_at:] += np.log1p(step) * (-1) ** number
    points = change_points(20 * np.exp(logs), device.tolist())
    return [point.index for point in points], step_at


def false_share(kind: str, draw: Draw, nights: int) -> float:
    return float(np.mean([bool(detected(kind, draw, nights, 0.0, i)) for i in range(SERIES)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", default="", help="only kinds that have this text in their names")
    text = parser.parse_args().kind
    out = sys.stdout.write
    out("| noise, 150 nights | false | 2 % detected within ±3 nights | 5 % | 10 % |\n")
    out("| --- | ---: | ---: | ---: | ---: |\n")
    for kind, draw in KINDS.items():
        if text not in kind:
            continue
        out(f"| {kind} | {false_share(kind, draw, NIGHTS):.1%} |")
        for step in STEPS:
            near = [
                any(
                    abs(index - STEP_AT) <= MAX_DISTANCE
                    for index in detected(kind, draw, NIGHTS, step, number)
                )
                for number in range(SERIES)
            ]
            out(f" {np.mean(near):.1%} |")
        out("\n")
        sys.stdout.flush()
    for kind in RECORDED:
        if text not in kind:
            continue
        out(f"| {kind} |")
        for step in (0.0, *STEPS):
            series = [detected_recorded(kind, NIGHTS, step, number) for number in range(SERIES)]
            hits = [
                any(abs(index - step_at) <= MAX_DISTANCE for index in places)
                if step
                else bool(places)
                for places, step_at in series
            ]
            out(f" {np.mean(hits):.1%} |")
        out("\n")
        sys.stdout.flush()
    if text:
        return
    out(f"\n| noise | {' | '.join(f'{n} nights' for n in LENGTHS)} |\n")
    out(f"| --- |{' ---: |' * len(LENGTHS)}\n")
    for kind, draw in SHORT.items():
        shares = " | ".join(f"{false_share(kind, draw, nights):.1%}" for nights in LENGTHS)
        out(f"| {kind} | {shares} |\n")


if __name__ == "__main__":
    main()

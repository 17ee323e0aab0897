"""Kernels with two speeds: comparison within a mode, and of the number of slow processes."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.verdicts import Comparison, Verdict, confirm, noise_levels
from flexq_bench.verdicts.process_modes import process_modes

PAIRS = 12


def comparison(
    seed: int,
    *,
    shift: float = 0.0,
    slow: tuple[float, float] = (0.5, 0.5),
    gap: float = 0.115,
    scatter: float = 0.002,
) -> Comparison:
    """Two blocks in each of 12 pairs of processes; slow: chances of the modes of base and head."""
    rng = np.random.default_rng(seed)
    offsets = scatter * rng.standard_normal((2, PAIRS))
    offsets += gap * (rng.random((2, PAIRS)) < np.array(slow)[:, None])
    offsets[1] += shift
    blocks = np.repeat(offsets, 2, axis=1) + scatter / 2 * rng.standard_normal((2, 2 * PAIRS))
    base, head = 100 * np.exp(blocks)
    return Comparison(base, head, np.repeat(np.arange(PAIRS), 2))


@pytest.mark.parametrize("shift", [0.02, 0.03, 0.05])
def test_step_of_both_speeds_is_detected(shift):
    found = [confirm(comparison(seed, shift=shift)) for seed in range(50)]

    assert sum(confirmation.verdict is Verdict.SLOWER for confirmation in found) >= 48
    assert np.median([confirmation.log_ratio for confirmation in found]) == pytest.approx(
        shift, abs=0.002
    )
    assert "two speeds 1" in found[0].reason


def test_two_speeds_alone_are_no_change():
    found = [confirm(comparison(seed)).verdict for seed in range(200)]

    assert found.count(Verdict.SAME) >= 195
    assert found.count(Verdict.SLOWER) + found.count(Verdict.FASTER) == 0


def test_more_slow_processes_are_slower():
    found = [confirm(comparison(seed, slow=(0.1, 0.95))) for seed in range(20)]

    assert sum(confirmation.verdict is Verdict.SLOWER for confirmation in found) >= 17
    assert sum(confirmation.verdict is Verdict.FASTER for confirmation in found) == 0
    assert any("of 12 of head" in confirmation.reason for confirmation in found)


def test_more_slow_processes_with_a_small_change_are_not_slower():
    found = [
        confirm(comparison(seed, slow=(0.2, 0.95), gap=0.0115, scatter=0.0004))
        for seed in range(20)
    ]

    assert all(
        confirmation.log_ratio >= confirmation.smallest_change
        for confirmation in found
        if confirmation.verdict is Verdict.SLOWER
    )
    assert any(
        confirmation.modes is not None and confirmation.modes.p_value < 0.001
        for confirmation in found
    )


@pytest.mark.parametrize("slow", [(0.0, 1.0), (0.0, 0.0)])
def test_a_step_is_no_mode(slow):
    one = comparison(3, slow=slow)

    assert confirm(one).modes is None
    assert (confirm(one).verdict is Verdict.SLOWER) == (slow == (0.0, 1.0))


def test_noise_of_one_speed_has_no_modes():
    rng = np.random.default_rng(5)
    drawn = 0.01 * rng.standard_normal((2000, 2, 6))

    assert sum(process_modes(base, head) is not None for base, head in drawn) <= 1


def test_noise_floor_of_two_speeds_is_within_a_mode():
    levels = noise_levels([comparison(seed) for seed in range(6)])

    assert levels is not None
    assert levels.noise_floor < 0.005


def test_two_stray_processes_are_no_mode():
    """One of either side: what these two differ by is scatter, and no change of a mode."""
    rng = np.random.default_rng(7)
    base, head = 0.001 * rng.standard_normal((2, 6))
    base[2] += 0.05
    head[4] += 0.09

    assert process_modes(base, head) is None


@pytest.mark.parametrize("sigma", [0.002, pytest.param(0.005, marks=pytest.mark.slow)])
def test_heavy_tails_are_no_modes(sigma):
    rng = np.random.default_rng(9)
    drawn = sigma / 1.5 * rng.standard_t(2, (4000, 2, 6))
    pairs = np.repeat(np.arange(6), 2)

    found = [
        confirm(Comparison(*(100 * np.exp(np.repeat(side, 2)) for side in sides), pairs))
        for sides in drawn
    ]

    sure = [
        confirmation
        for confirmation in found
        if confirmation.p_value < 1e-4 and abs(confirmation.log_ratio) > 0.01
    ]
    assert len(sure) <= 1

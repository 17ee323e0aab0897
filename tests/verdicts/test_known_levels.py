"""Histories at their newest level, by what comparisons confirmed."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.verdicts.known_levels import Compared, known_levels

NOISE = 0.003 * np.random.default_rng(3).standard_normal(40)


def times(*levels: tuple[int, float]) -> list[float]:
    """Noisy times: (number of results, level) of each stretch."""
    level = np.concatenate([np.full(count, value) for count, value in levels])
    return list(level * np.exp(NOISE[: level.size]))


def test_confirmed_change_moves_earlier_results_to_the_new_level():
    values = times((20, 100.0), (3, 110.0))

    known = known_levels(values, [Compared(15, 20, np.log(1.1))])

    assert known.values == pytest.approx(np.full(23, 110.0), rel=0.02)
    assert known.unchanged == ()


def test_late_confirmation_moves_only_results_before_the_step():
    values = times((20, 100.0), (5, 110.0))

    known = known_levels(values, [Compared(17, 23, np.log(1.1))])

    assert known.values == pytest.approx(np.full(25, 110.0), rel=0.02)


def test_return_to_the_good_level_joins_its_results():
    values = times((15, 100.0), (5, 110.0), (3, 100.0))
    comparisons = [Compared(10, 15, np.log(1.1)), Compared(14, 20, 0.0)]

    known = known_levels(values, comparisons)

    assert known.values == pytest.approx(np.full(23, 100.0), rel=0.02)
    assert known.unchanged == ()


def test_two_confirmed_changes_add_up():
    values = times((12, 100.0), (6, 110.0), (6, 121.0))
    comparisons = [Compared(8, 12, np.log(1.1)), Compared(13, 18, np.log(1.1))]

    assert known_levels(values, comparisons).values == pytest.approx(np.full(24, 121.0), rel=0.02)


def test_comparison_without_a_change_marks_its_head_as_noise():
    values = times((20, 100.0))
    values[12] = 104.0

    known = known_levels(values, [Compared(7, 12, 0.0)])

    assert known.unchanged == (12,)
    assert known.values == pytest.approx(values)


def test_same_level_as_confirmed_before_is_noise():
    values = times((20, 100.0), (6, 110.0))
    confirmed = Compared(15, 20, np.log(1.1))

    known = known_levels(values, [confirmed, Compared(15, 24, np.log(1.102))])

    assert known.unchanged == (24,)


@pytest.mark.parametrize("verdict", ["ambiguous", "no-data", "incorrect"])
def test_verdict_without_a_change_says_nothing(verdict):
    assert Compared.of(verdict, 0.1, 1, 2) is None
    assert Compared.of("same", 0.004, 1, 2) == Compared(1, 2, 0.0)

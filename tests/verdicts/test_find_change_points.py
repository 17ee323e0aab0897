"""The service of change points: scales, smallest changes, withdrawn changes."""

from __future__ import annotations

import numpy as np

from flexq_bench.verdicts.change_points import (
    Change,
    Point,
    Scale,
    find_change_points,
)


def _points(levels: list[tuple[int, float]], sigma: float = 0.5) -> list[Point]:
    rng = np.random.default_rng(7)
    values = [
        level + sigma * rng.standard_normal() for count, level in levels for _ in range(count)
    ]
    return [Point(value) for value in values]


def test_step_has_medians_of_both_sides() -> None:
    (step,) = find_change_points(_points([(40, 100), (20, 110)])).steps
    assert step.index == 40
    assert abs(step.before - 100) < 0.5
    assert abs(step.after - 110) < 0.5
    assert 0.09 < step.relative < 0.11


def test_differences_may_start_at_zero_and_be_negative() -> None:
    (step,) = find_change_points(_points([(40, 0), (20, -5)]), Scale.DIFFERENCE).steps
    assert step.index == 40
    assert -5.5 < step.difference < -4.5


def test_change_below_smallest_is_left_out() -> None:
    points = _points([(40, 100), (20, 105)], sigma=0.1)
    assert find_change_points(points, smallest=0.04).steps
    assert not find_change_points(points, smallest=0.06).steps


def test_reported_change_that_is_gone_is_withdrawn_with_reason() -> None:
    points = _points([(60, 100)])
    reported = [Change(30, 100, 101, 1e-4)]
    (gone,) = find_change_points(points, reported=reported).withdrawn
    assert gone.index == 30
    assert gone.reason

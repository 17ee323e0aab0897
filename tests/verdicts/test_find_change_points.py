"""The service of change points: scales, smallest changes, reasons."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flexq_bench.verdicts.change_points import (
    Point,
    Scale,
    find_change_points,
    reason_without_step,
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


def test_reason_without_a_step_names_where_it_is_now() -> None:
    found = find_change_points(_points([(40, 100), (20, 110)]))
    assert "+8 results" in reason_without_step(found, 32, rises=True)
    assert "bear it out" in reason_without_step(found, 32, rises=False)


def test_levels_of_other_epochs_are_not_compared() -> None:
    points = _points([(40, 100), (40, 120), (40, 130)])
    later = [replace(point, epoch=place >= 40) for place, point in enumerate(points)]
    (step,) = find_change_points(later).steps
    assert step.index == 80
    assert [one.index for one in find_change_points(points).steps] == [40, 80]


def test_points_of_an_epoch_need_not_be_adjacent() -> None:
    points = _points([(40, 100), (40, 120)])
    mixed = [Point(500.0, epoch="other") if place % 2 else point
             for place, point in enumerate(one for one in points for _ in range(2))]  # fmt: skip
    (step,) = find_change_points(mixed).steps
    assert step.index == 80

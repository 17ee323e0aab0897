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
from flexq_bench.verdicts.history_verdict import Metric, evidence_of, judge_history, judged_again


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


def _three_runs(spread: float) -> tuple[list[float], list[tuple[float, ...]]]:
    """A step of 3 % in values that each combine three runs."""
    values = (
        np.repeat([100.0, 103.0], 40) * np.exp(0.003 * np.random.default_rng(1).standard_normal(80))
    ).tolist()
    return values, [(value * (1 - spread), value, value * (1 + spread)) for value in values]


def test_spread_of_reruns_hides_a_step_within_it() -> None:
    values, close = _three_runs(0.002)
    _, apart = _three_runs(0.1)
    found = [
        find_change_points(
            [Point(value, reruns=own) for value, own in zip(values, runs, strict=True)]
        ).steps
        for runs in (close, apart)
    ]
    assert [[step.index for step in steps] for steps in found] == [[40], []]


def test_verdict_with_reruns_is_recomputed_from_its_evidence() -> None:
    values, reruns = _three_runs(0.002)
    metric = Metric("time", "us", "lower")
    (step,) = judge_history(values, metric, reruns).steps
    evidence = evidence_of(values, reruns, [str(place) for place in range(80)], metric, step)
    assert judged_again(evidence) == step
    _, apart = _three_runs(0.1)
    assert judged_again(evidence | {"reruns": apart}) is None


def test_few_or_single_runs_say_nothing_of_noise() -> None:
    values, _ = _three_runs(0.0)
    two = [(value * 0.5, value * 1.5) if place < 2 else () for place, value in enumerate(values)]
    for reruns in (two, [(value,) for value in values]):
        points = [Point(value, reruns=own) for value, own in zip(values, reruns, strict=True)]
        assert [step.index for step in find_change_points(points).steps] == [40]

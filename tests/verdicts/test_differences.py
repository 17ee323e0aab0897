"""Change points of counts and signed values: differences, at which 0 is a value like others."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.verdicts.change_points import Point, Scale, find_change_points


def changes(values, scale=Scale.DIFFERENCE):
    found = find_change_points([Point(value) for value in values], scale)
    return [(one.index, one.before, one.after) for one in found.steps]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 0, 0, 5], [(3, 0, 5)]),
        ([0, 0, 0, -2], [(3, 0, -2)]),
        ([0, 0, 0, 5, 6, 5], [(3, 0, 5)]),
        ([0] * 3 + [5] * 3 + [9] * 3, [(3, 0, 5), (6, 5, 9)]),
        ([0, 0, 5], []),
        ([0, 0, 0, 5, 0], []),
        ([0, 1, 0, 0, 0, 0, 2], []),
        ([0] * 10 + [5] * 10 + [0] * 10, [(10, 0, 5), (20, 5, 0)]),
        ([7] * 12, []),
        ([], []),
    ],
)
def test_exact_count_changes_when_it_leaves_its_value_for_good(values, expected):
    assert changes(values, Scale.COUNT) == expected


def test_small_part_of_a_large_count_is_no_change():
    assert changes([1_000_000] * 5 + [1_000_004] * 5, Scale.COUNT) == []
    assert changes([1_000_000] * 5 + [1_010_000] * 5, Scale.COUNT) == [(5, 1_000_000, 1_010_000)]


def test_step_across_zero_is_found_in_noise():
    noise = np.random.default_rng(3).normal(0, 0.05, 40)
    values = noise + np.repeat([-0.2, 0.1], 20)

    ((index, before, after),) = changes(values)

    assert index == 20
    assert (before, after) == (pytest.approx(-0.2, abs=0.03), pytest.approx(0.1, abs=0.03))


def test_shift_and_sign_change_no_step():
    values = np.random.default_rng(4).normal(0, 1, 60) + np.repeat([0, 8], 30)

    (first,) = changes(values)

    assert [index for index, *_ in changes(values + 1e4)] == [first[0]]
    assert [index for index, *_ in changes(-values)] == [first[0]]


def test_noise_around_zero_has_few_steps():
    random = np.random.default_rng(5)

    found = [changes(random.normal(0, 1, 40)) for _ in range(100)]

    assert sum(map(bool, found)) <= 1

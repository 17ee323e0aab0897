"""The budget of comparisons: order of the candidates by evidence."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.verdicts.budget import Surprise, joint_sigmas, ranked, surprise


def history(sigma: float, seed: int = 1, gap: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    upper = rng.random(30) < 0.5
    return 100 * np.exp(sigma * rng.standard_normal(30) + gap * upper)


def test_surprise_is_relative_to_the_nearest_mode():
    quiet, two_speeds = history(0.003), history(0.003, gap=0.115)

    assert surprise(quiet, 102.0) > 5
    assert abs(surprise(two_speeds, 112.2)) < 3
    assert abs(surprise(two_speeds, 100.0)) < 3
    assert surprise(two_speeds, 114.5) > 5  # the slow mode itself is slower


@pytest.mark.parametrize(("values", "latest"), [([], 100.0), ([100.0], 0.0), ([0.0], 100.0)])
def test_empty_history_gives_no_surprise(values, latest):
    assert surprise(values, latest) == 0


def test_small_joint_change_of_a_family_is_significant():
    together = [Surprise(0.5, "flexq") for _ in range(100)]
    alone = [Surprise(50.0, "abq"), *(Surprise(0.0, "abq") for _ in range(99))]

    joint = joint_sigmas([*together, *alone])

    assert joint["flexq"] == pytest.approx(5.0)
    assert joint["abq"] == pytest.approx(0.4)  # one of them makes no family


def test_first_of_a_changed_family_ranks_before_noise():
    family = [Surprise(2.0, "flexq") for _ in range(40)]
    noise = [Surprise(sigmas, ("other", i)) for i, sigmas in enumerate((2.5, 3.0, 3.4))]

    order = ranked([*family, *noise])

    assert all(index < 40 for index in order[:3])
    assert {40, 41, 42} <= set(order[:15])


def test_waiting_candidates_rank_first():
    surprises = [
        Surprise(2.5, "a"),
        Surprise(2.5, "b", waited=2),
        Surprise(9.0, "c", is_candidate=False),
    ]

    assert ranked(surprises) == [1, 0]

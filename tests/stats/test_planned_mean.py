from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import (
    MIN_VALUES,
    Decision,
    TestPlan,
    decide,
    detectable_loss,
    item_difference,
    loss_p_value,
    questions_needed,
)
from flexq_bench.stats.planned_mean import simulated_decisions, simulated_rates

PLAN = TestPlan(effect=0.01, alpha=0.01, power=0.95)
DRAWS = 600


def autoregressive(rng: np.random.Generator, shape: tuple[int, int], lag1: float) -> np.ndarray:
    series = rng.normal(size=shape)
    for place in range(1, shape[1]):
        series[:, place] *= (1 - lag1**2) ** 0.5
        series[:, place] += lag1 * series[:, place - 1]
    return series


def skewed(rng: np.random.Generator, shape: tuple[int, int], sign: int) -> np.ndarray:
    values = rng.lognormal(0, 1, shape) - np.exp(0.5)
    return sign * values / np.sqrt(np.expm1(1) * np.e)


LOSSES = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "heavy tails": lambda rng, shape: rng.standard_t(3, shape) / 3**0.5,
    "right skew": lambda rng, shape: skewed(rng, shape, 1),
    "left skew": lambda rng, shape: skewed(rng, shape, -1),
    "autocorrelated": lambda rng, shape: autoregressive(rng, shape, 0.6),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_error_rates_keep_to_the_plan(kind):
    """Six standard errors of 600 draws are about 0.025."""
    series = 0.015 * LOSSES[kind](np.random.default_rng(0), (DRAWS, 800))

    assert simulated_decisions(PLAN, series)[0].mean() <= 0.025
    assert simulated_decisions(PLAN, series + PLAN.effect)[0].mean() >= 0.93


def test_loss_carried_by_a_twentieth_is_detected():
    rng, shape = np.random.default_rng(0), (DRAWS, 1000)
    series = 0.005 * rng.normal(size=shape) + 0.2 * (rng.random(shape) < 0.05)

    assert simulated_decisions(PLAN, series)[0].mean() >= 0.85


def test_autocorrelated_values_need_more():
    rng = np.random.default_rng(0)
    independent = PLAN.needed(0.02 * rng.normal(size=(50, 400))).mean()
    correlated = PLAN.needed(0.02 * autoregressive(rng, (50, 400), 0.6)).mean()

    assert correlated > 2.5 * independent


def test_clear_cases_end_at_the_minimum():
    values = np.random.default_rng(1).normal(0.0, 0.01, MIN_VALUES)

    assert decide(PLAN, values + 0.05, first=True) is Decision.ABOVE
    assert decide(PLAN, values - 0.05, first=True) is Decision.BELOW


def test_between_first_and_planned_number_nothing_is_decided():
    values = np.random.default_rng(1).normal(0.005, 0.05, 2 * MIN_VALUES)

    assert PLAN.needed(values) > values.size
    assert decide(PLAN, values + 0.02) is Decision.OPEN


def test_too_few_values_leave_the_test_open():
    values = np.random.default_rng(1).normal(0.0, 0.05, MIN_VALUES)
    assert decide(PLAN, values - values.mean() + 0.004, last=True) is Decision.OPEN
    assert decide(PLAN, values + 0.5, last=True) is Decision.ABOVE
    assert decide(PLAN, np.zeros(MIN_VALUES - 1), last=True) is Decision.OPEN


def test_equal_models_are_below():
    assert decide(PLAN, np.zeros(MIN_VALUES), first=True) is Decision.BELOW
    assert decide(PLAN, np.full(MIN_VALUES, 1e-3), first=True) is Decision.ABOVE


def test_detectable_effect_is_the_planned_effect():
    values = np.random.default_rng(0).normal(0, 0.02, 300)
    found = PLAN.detectable(values)
    plan = TestPlan(found, PLAN.alpha, PLAN.power)

    assert plan.needed(values) == pytest.approx(300, rel=0.1)


def test_simulated_rates_are_of_the_given_losses():
    losses = np.random.default_rng(0).lognormal(0, 1, 200)
    false_alarms, missed = simulated_rates(PLAN, -losses, 300, seed=0, draws=500)

    assert false_alarms <= 0.03
    assert missed <= 0.08
    assert simulated_rates(PLAN, np.ones(100), 300, seed=0) == (0.0, 0.0)


@pytest.mark.parametrize(("alpha", "power"), [(0.6, 0.9), (0.01, 0.4), (0.0, 0.9)])
def test_invalid_probabilities_are_refused(alpha, power):
    with pytest.raises(ValueError, match="alpha must be"):
        TestPlan(0.01, alpha, power)


def test_planned_questions_detect_the_planned_loss():
    """Simulated: a tenth of the questions answered otherwise, 2 points lost."""
    count = questions_needed(0.1, 0.02, alpha=0.01, power=0.95)
    assert count == pytest.approx(3900, rel=0.02)  # (2.326 √0.1 + 1.645 √0.0996)² / 0.0004
    seen = false = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        lost, won = rng.multinomial(count, (0.06, 0.04, 0.9))[:2]
        seen += loss_p_value(lost, won) <= 0.01
        lost, won = rng.multinomial(count, (0.05, 0.05, 0.9))[:2]
        false += loss_p_value(lost, won) <= 0.01
    assert seen / 300 == pytest.approx(0.95, abs=0.04)
    assert false / 300 <= 0.03


def test_one_sided_p_value_is_half_of_the_two_sided():
    base, head = [1] * 30 + [0] * 70, [0] * 12 + [1] * 18 + [0] * 70
    found = item_difference(base, head)
    assert loss_p_value(found.only_base, found.only_head) == pytest.approx(found.p_value / 2)
    assert loss_p_value(0, 0) == 1


def test_few_questions_detect_only_large_losses():
    assert detectable_loss(0.1, 4000, alpha=0.01, power=0.95) == pytest.approx(0.02, rel=0.03)
    assert detectable_loss(0.1, 5, alpha=0.01, power=0.95) == 1.0

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats import (
    Decision,
    GroupSequentialTest,
    TestPlan,
    detectable_loss,
    item_difference,
    loss_p_value,
    questions_needed,
)

PLAN = TestPlan(effect=0.01, alpha=0.01, power=0.95)


def decided(plan: TestPlan, values: np.ndarray, *, pilot: int = 10) -> tuple[Decision, int]:
    """The decision of a test that takes data as it needs them, and how many it took."""
    test, count = GroupSequentialTest(plan), min(pilot, values.size)
    while True:
        decision = test.look(values[:count], last=count == values.size)
        if decision is not Decision.OPEN or count == values.size:
            return decision, count
        needed = plan.needed(float(values[:count].std(ddof=1)))
        count = min(values.size, max(count + max(2, needed // 5), count + 1))


def share_above(mean: float, deviation: float, draws: int, plan: TestPlan = PLAN) -> float:
    size = 4 * plan.needed(deviation)
    made = (np.random.default_rng(seed).normal(mean, deviation, size) for seed in range(draws))
    return sum(decided(plan, values)[0] is Decision.ABOVE for values in made) / draws


@pytest.mark.slow
@pytest.mark.parametrize("deviation", [0.01, 0.03])
def test_error_rates_are_as_planned_in_a_thousand_draws(deviation):
    """Three standard errors of 1,000 draws: 0.009 at 1 %, 0.021 at 95 %."""
    assert share_above(0.0, deviation, 1000) <= 0.01 + 0.0095
    assert abs(share_above(0.01, deviation, 1000) - 0.95) <= 0.021


def test_downward_skew_reduces_the_significance():
    """As large a t of 42 values, 2.63: just past 0.6 % of Student's."""
    values = np.random.default_rng(0).gamma(4, 1, 42)
    standard = (values - values.mean()) / values.std(ddof=1)
    for skewed, expected in ((standard, Decision.ABOVE), (-standard, Decision.OPEN)):
        test = GroupSequentialTest(TestPlan(effect=0.6, alpha=0.01, power=0.95))
        assert test.look(skewed + 2.63 / 42**0.5, last=True) is expected


def test_error_rates_are_near_the_plan_in_a_hundred_draws():
    assert share_above(0.0, 0.02, 100) <= 0.05
    assert share_above(0.01, 0.02, 100) >= 0.87


def test_clear_effect_needs_fewer_values():
    needed = PLAN.needed(0.02)
    rng = np.random.default_rng(0)
    for mean, expected in ((0.05, Decision.ABOVE), (-0.05, Decision.BELOW)):
        decision, count = decided(PLAN, rng.normal(mean, 0.02, 4 * needed))
        assert decision is expected
        assert count < needed / 2


def test_too_few_values_leave_the_test_open():
    few = PLAN.needed(0.05) // 10
    values = np.random.default_rng(1).normal(0.0, 0.05, few)
    assert decided(PLAN, values - values.mean() + 0.004)[0] is Decision.OPEN
    assert decided(PLAN, values + 0.5)[0] is Decision.ABOVE


def test_detectable_effect_is_the_planned_effect():
    needed = PLAN.needed(0.02)
    assert PLAN.detectable(0.02, needed) == pytest.approx(0.01, rel=0.01)
    assert PLAN.detectable(0.02, needed // 4) == pytest.approx(0.02, rel=0.1)
    assert PLAN.needed(0.04) > 3.5 * needed


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

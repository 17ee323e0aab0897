"""The group-sequential test of paired scores."""

from __future__ import annotations

import numpy as np
import pytest

from flexq_bench.stats.paired import loss_p_value
from flexq_bench.stats.planned_mean import Decision
from flexq_bench.stats.sequential_loss import LossTest, decide_floor, decide_loss, look_counts


def _losses(lost: int, won: int, count: int) -> np.ndarray:
    values = np.zeros(count)
    values[:lost], values[lost : lost + won] = 1, -1
    return values


def _run(test: LossTest, values: np.ndarray, samples: int) -> Decision:
    looks = look_counts(values.size)
    for count in looks:
        decision = decide_loss(test, values[:count], looks=looks, samples=samples)
        if decision is not Decision.OPEN:
            return decision
    return Decision.OPEN


@pytest.mark.parametrize("lost", range(10, 40, 3))
def test_one_look_without_margin_is_mcnemars_exact_test(lost: int):
    test = LossTest(0.01, alpha=0.01)

    decision = decide_loss(test, _losses(lost, 8, 200), looks=(200,))

    assert (decision is Decision.ABOVE) is (loss_p_value(lost, 8) <= 0.01)


def test_samples_of_one_question_are_not_counted_apart():
    whole = decide_loss(LossTest(0.05), _losses(9, 0, 100), looks=(100,), samples=8)
    parts = decide_loss(LossTest(0.05), _losses(72, 0, 800), looks=(800,))

    assert (whole, parts) == (Decision.ABOVE, Decision.ABOVE)
    assert decide_loss(LossTest(0.05), _losses(5, 0, 100), looks=(100,), samples=8) is not whole


def test_few_equal_answers_do_not_exclude_loss():
    assert decide_loss(LossTest(0.03), np.zeros(30), looks=(30,)) is Decision.OPEN
    assert decide_loss(LossTest(0.03), np.zeros(300), looks=(300,)) is Decision.BELOW


def test_accepted_loss_moves_the_boundary():
    losses = _losses(60, 10, 1000)

    assert decide_loss(LossTest(0.06), losses, looks=(1000,)) is Decision.ABOVE
    accepting = LossTest(0.08, accept=0.05)
    assert decide_loss(accepting, losses, looks=(1000,)) is Decision.BELOW


@pytest.mark.parametrize(
    ("right", "decision"),
    [(0, Decision.ABOVE), (500, Decision.ABOVE), (600, Decision.OPEN), (1000, Decision.BELOW)],
)
def test_floor_is_decided_beyond_its_interval(right: int, decision: Decision):
    scores = np.arange(1000) < right

    assert decide_floor(LossTest(0.05), scores, floor=0.6, looks=(500, 1000)) is decision


def test_looks_end_with_all_questions():
    assert look_counts(1319)[-1] == 1319
    assert look_counts(12) == (12,)


@pytest.mark.parametrize("values", [[0.3], [2.0]])
def test_losses_of_other_samples_are_refused(values: list[float]):
    with pytest.raises(ValueError, match="samples"):
        decide_loss(LossTest(0.1), values, looks=(1,), samples=2)


@pytest.mark.parametrize(("detect", "accept"), [(0.0, 0.0), (0.02, 0.02), (1.5, 0.0)])
def test_impossible_losses_are_refused(detect: float, accept: float):
    with pytest.raises(ValueError, match="loss to detect"):
        LossTest(detect, accept)


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "accept"), [(1, 0.0), (1, 0.01), (4, 0.0)])
def test_error_rates_over_all_looks(samples: int, accept: float):
    test, draws, count = LossTest(0.03 + accept, accept, alpha=0.01, power=0.9), 1000, 1319
    rng = np.random.default_rng(5)
    rates = []
    for loss in (accept, test.detect):
        places = rng.random((draws, count, samples))
        spread = 0.08 if samples == 1 else 0.3
        lost, won = (spread + loss) / 2, (spread - loss) / 2
        series = ((places < lost) * 1.0 - ((places >= lost) & (places < lost + won))).mean(axis=2)
        decisions = [_run(test, row, samples) for row in series]
        rates.append([decisions.count(d) / draws for d in (Decision.ABOVE, Decision.BELOW)])
    (false_alarms, _), (found, missed) = rates

    assert false_alarms <= 0.015  # 0.01, and what 1,000 draws may add
    assert found >= 0.85
    assert missed <= 0.13

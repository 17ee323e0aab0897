"""The error rates of a policy with several texts and a task, over simulated gates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexq_bench.ci.accuracy_gate.contract import AccuracyPolicy
from flexq_bench.ci.accuracy_gate.policy import load_accuracy_policy
from flexq_bench.ci.accuracy_gate.text_test import TextTest
from flexq_bench.stats import Decision, loss_p_value

ALPHA, POWER, SEGMENTS, QUESTIONS = 0.06, 0.9, 400, 600
TEXTS = ("wikitext", "c4", "ptb")
POLICY = f"""
version = 1
schemes = ["w6a6"]
detect = 1.0
power = {POWER}
alpha = {ALPHA}
[[task]]
name = "piqa"
metric = "acc"
margin_points = 3.0
"""


@pytest.fixture
def policy(tmp_path) -> AccuracyPolicy:
    path = tmp_path / "policy.toml"
    texts = "".join(f'[[perplexity]]\ntext = "{text}"\n' for text in TEXTS)
    path.write_text(POLICY + texts)
    return load_accuracy_policy(str(path))


def failed_limits(policy: AccuracyPolicy, losses: np.ndarray, wrong: np.ndarray) -> list[str]:
    """The limits that fail. losses: nats by text and segment; wrong: by question, lost or won."""
    failed = []
    for row, (text, plan) in zip(losses, policy.text_plans().items(), strict=True):
        test = TextTest(plan, range(SEGMENTS), 0, range(SEGMENTS), rates=(0.0, 0.0))
        while test.decision is Decision.OPEN and (wanted := test.required()) > test.evaluated:
            test.add(np.zeros(wanted), row[:wanted])
        if test.decision is Decision.ABOVE:
            failed.append(text)
    if loss_p_value(int((wrong > 0).sum()), int((wrong < 0).sum())) <= policy.planned_alpha:
        failed.append("piqa")
    return failed


def simulated(policy: AccuracyPolicy, gates: int, shared: float, loss: float) -> np.ndarray:
    """By gate, whether it failed and whether the first text did, where that text has a loss.

    shared: the part of the scatter that the texts have in common.
    """
    rng = np.random.default_rng(0)
    failed = []
    for _ in range(gates):
        common, own = rng.normal(size=SEGMENTS), rng.normal(size=(len(TEXTS), SEGMENTS))
        losses = 0.02 * (math.sqrt(shared) * common + math.sqrt(1 - shared) * own)
        losses[0] += math.log1p(loss)
        wrong = rng.choice([0, 1, -1], p=[0.9, 0.05, 0.05], size=QUESTIONS)
        names = failed_limits(policy, losses, wrong)
        failed.append((bool(names), TEXTS[0] in names))
    return np.array(failed)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_joint_false_alarm_rate_is_at_most_alpha(policy, shared):
    gates = 1000
    rate = simulated(policy, gates, shared, 0.0)[:, 0].mean()
    assert rate <= ALPHA + 2 * math.sqrt(ALPHA * (1 - ALPHA) / gates)
    print(f"shared {shared}: {rate:.4f} of {ALPHA}")  # noqa: T201 (the figure in docs)


@pytest.mark.slow
def test_loss_on_one_of_several_texts_is_detected(policy):
    gates = 1000
    rate = simulated(policy, gates, 0.5, 0.01)[:, 1].mean()
    assert rate >= POWER - 2 * math.sqrt(POWER * (1 - POWER) / gates)
    print(f"power {rate:.4f} of {POWER}")  # noqa: T201

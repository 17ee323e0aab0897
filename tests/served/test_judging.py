"""Verdicts on stored answers of two engines."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from flexq_bench.served.client import Answer, Client, Outcome, TokenLogprob
from flexq_bench.served.divergence import token_divergence
from flexq_bench.served.judging import judge_accuracy, judge_divergence
from flexq_bench.served.paired import PairedAnswers, PairedSuite, begin
from flexq_bench.served.questions import Asking, OnQuestion, QuestionSuite, Scored
from flexq_bench.stats.sequential_loss import LossTest

_COUNT = 1000


class _Stored(QuestionSuite):
    name, metric, data_hash, count = "stored", "right", "0" * 64, _COUNT

    async def ask(
        self, client: Client, indices: Sequence[int], asking: Asking, on_question: OnQuestion
    ) -> list[Scored]:
        raise NotImplementedError


def _token(top: dict[str, float]) -> TokenLogprob:
    logs = {token: math.log(p) for token, p in top.items()}
    return TokenLogprob(max(top, key=top.__getitem__), None, logs)


def _answers(
    rights: dict[str, int],
    tops: dict[str, dict[str, float]] | None = None,
    *,
    reported: int = _COUNT,
    at_least: float | None = None,
) -> PairedAnswers:
    """rights: of the first questions. tops: predictions; of head in `reported` of its answers."""
    test = LossTest(0.05, power=0.95)
    answers = begin(PairedSuite(_Stored(), Asking(), test, at_least=at_least), seed=0)
    for name, right in rights.items():
        for i in range(_COUNT):
            is_reported = tops is not None and (name == "base" or i < reported)
            tokens = (_token(tops[name]),) if tops is not None and is_reported else ()
            answer = Answer(Outcome.OK, "x", logprobs=tokens)
            answers.scored[name][i] = Scored(float(i < right), (answer,))
    answers.compare(range(_COUNT))
    answers.look()
    return answers


def test_base_without_right_answers_can_not_show_a_loss():
    limit = judge_accuracy(_answers({"base": 0, "head": 0}))

    assert limit.outcome == "not judged"
    assert "base is right on 0 %" in limit.reason


@pytest.mark.parametrize(("right", "outcome"), [(500, "fail"), (610, "ambiguous"), (700, "pass")])
def test_least_score_is_judged_with_its_interval(right: int, outcome: str):
    limit = judge_accuracy(_answers({"base": right, "head": right}, at_least=0.6))

    assert limit.outcome == outcome


def test_predictions_without_a_common_token_diverge():
    tops = {"base": {"a": 0.9, "b": 0.05}, "head": {"x": 0.9, "y": 0.05}}

    limit = judge_divergence(_answers({"base": 900, "head": 900}, tops), mean=0.05, alpha=0.001)

    assert limit.outcome == "fail"
    assert limit.value is not None
    assert limit.value > 1


@pytest.mark.parametrize(("reported", "outcome"), [(_COUNT, "pass"), (100, "not judged")])
def test_divergence_needs_predictions_of_most_answers(reported: int, outcome: str):
    top = {"a": 0.9, "b": 0.05}
    answers = _answers({"base": 900, "head": 900}, {"base": top, "head": top}, reported=reported)

    limit = judge_divergence(answers, mean=0.05, alpha=0.001)

    assert limit.outcome == outcome
    # A policy that allows engines without log-probabilities allows no head that lost them.
    assert limit.check.startswith("KL of" if outcome == "pass" else "log-probabilities of")


def test_divergence_of_likeliest_tokens_is_a_lower_bound():
    rng = np.random.default_rng(4)
    for _ in range(300):
        base, head = rng.dirichlet(np.full(12, rng.choice([0.1, 1.0, 10.0])), 2) + 1e-12
        tops = [
            _token({str(i): float(row[i]) for i in np.argsort(row)[-4:]}) for row in (base, head)
        ]
        whole = float((base * np.log(base / head)).sum())

        found = token_divergence(*tops)

        assert found is not None
        assert found <= whole + 1e-6

"""Judge the answers of two engines: accuracy, faulty answers, divergence of predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flexq_bench.db.records import GateLimit
from flexq_bench.served.paired import PairedAnswers
from flexq_bench.served.questions import FAULTS, faults_of
from flexq_bench.served.turns import BASE, HEAD
from flexq_bench.stats import Interval, item_difference, mean_difference_interval
from flexq_bench.stats.planned_mean import Decision
from flexq_bench.stats.sequential_loss import Floats

_LEAST_REPORTED = 0.9  # of the answers for which base gives log-probabilities, also by head
FAIL, NOT_JUDGED, AMBIGUOUS, PASS = "fail", "not judged", "ambiguous", "pass"  # of GATE_OUTCOMES


@dataclass(frozen=True, slots=True)
class _Verdict:
    outcome: str
    reason: str


def judge_accuracy(answers: PairedAnswers) -> GateLimit:
    """Judge the loss of a suite's score, and head's score itself if there is a least one."""
    paired, losses = answers.paired, answers.losses
    test, name = paired.test, f"accuracy of {paired.suite.name}"
    limit = f"less than {100 * test.detect:g} points"
    if test.accept:
        limit += f", {100 * test.accept:g} accepted"
    if paired.at_least is not None:
        limit += f", at least {100 * paired.at_least:g} %"
    coverage = _coverage(answers)
    if losses.size == 0:
        reason = _missing(answers) or "nothing was asked"
        return _not_judged(name, limit, reason, coverage)
    base, head = (np.array([pair[side].score for pair in answers.both]) for side in (0, 1))
    interval = _interval(base, head, paired.asking.seed)
    verdict = _accuracy_verdict(answers, losses)
    if paired.at_least is not None and verdict.outcome != NOT_JUDGED:
        verdict = _with_floor(verdict, answers.floor, head, paired.at_least)
    if verdict.outcome == PASS and base.mean() < test.detect:
        reason = (
            f"base is right on {100 * base.mean():.3g} %, so it can't lose {100 * test.detect:g} "
            "points: see its answers, the checker and `stop`"
        )
        verdict = _Verdict(NOT_JUDGED, reason)
    return GateLimit(
        check=name,
        limit=limit,
        outcome=verdict.outcome,
        reason=verdict.reason,
        base=100 * float(base.mean()),
        value=100 * float(head.mean()),
        change=100 * interval.estimate,
        low=100 * interval.low,
        high=100 * interval.high,
        unit="points",
        detectable=100 * test.detectable(losses),
        coverage=coverage,
    )


def _accuracy_verdict(answers: PairedAnswers, losses: Floats) -> _Verdict:
    lost, won = int((losses > 0).sum()), int((losses < 0).sum())
    counts = f"{lost} questions lost, {won} won"
    if reason := _missing(answers):
        return _Verdict(NOT_JUDGED, f"{reason}; until then {counts}")
    if answers.decision is Decision.ABOVE:
        return _Verdict(FAIL, counts)
    if answers.decision is Decision.BELOW:
        return _Verdict(PASS, counts)
    shown = 100 * answers.paired.test.detectable(losses)
    return _Verdict(AMBIGUOUS, f"{counts}: {losses.size:,} questions show {shown:.3g} points")


def _with_floor(verdict: _Verdict, floor: Decision, head: Floats, at_least: float) -> _Verdict:
    """Return the verdict, or that on the least score if it is worse."""
    reason = f"is {100 * head.mean():.3g}, at least {100 * at_least:g} are due"
    if floor is Decision.ABOVE:
        return _Verdict(FAIL, reason)
    if floor is Decision.OPEN and verdict.outcome == PASS:
        return _Verdict(AMBIGUOUS, f"{reason}, which is within its interval")
    return verdict


def judge_faults(answers: PairedAnswers) -> Iterator[GateLimit]:
    """Judge whether head gives more faulty answers, by kind. What is undecided passes if the
    increase is less than half of that to detect."""
    test = answers.paired.faults
    if test is None:
        return
    limit, coverage = f"less than {100 * test.detect:g} points more", _coverage(answers)
    for kind in FAULTS:
        name = f"{kind} answers of {answers.paired.suite.name}"
        more = answers.more_faults(kind)
        if not more.size:
            reason = _missing(answers) or "nothing was asked"
            yield _not_judged(name, limit, reason, coverage)
            continue
        base, head = (
            np.array([faults_of(pair[side])[kind] for pair in answers.both]) for side in (0, 1)
        )
        decision = answers.faults[kind]
        if decision is Decision.ABOVE:
            outcome = FAIL
        elif reason := _missing(answers):
            outcome = NOT_JUDGED
        elif decision is Decision.BELOW or more.mean() < test.relevant:
            outcome = PASS
        else:
            outcome = AMBIGUOUS
        counts = f"{base.sum():.4g} of base, {head.sum():.4g} of head" if more.any() else ""
        yield GateLimit(
            check=name,
            limit=limit,
            outcome=outcome,
            reason=reason if outcome == NOT_JUDGED else counts,
            base=100 * float(base.mean()),
            value=100 * float(head.mean()),
            change=100 * float(more.mean()),
            low=None,
            high=None,
            unit="points",
            detectable=100 * test.detectable(more),
            coverage=coverage,
        )


def judge_divergence(
    answers: PairedAnswers, *, mean: float, alpha: float, reference: str = "", problem: str = ""
) -> GateLimit:
    """Judge the mean KL divergence of head's predictions, in nats a token.

    mean: the largest accepted one. It is that of questions' means, with an interval over questions;
    alpha: of failing a head that is at the limit. reference: from which it is; empty: from base.
    problem: why that could not be evaluated. A head without log-probabilities where base has them
    has a check of its own.
    """
    suite = answers.paired.suite.name
    name, limit = f"KL of {suite}", f"at most {mean:g} nats from {reference or BASE}"
    compared, of_base = answers.divergences[HEAD], _means(answers.divergences[BASE])
    values = _means(compared)
    coverage = f"{len(values):,} questions"
    if len(values) < max(2.0, _LEAST_REPORTED * len(compared)):
        if reason := problem or _missing(answers):
            return _not_judged(name, limit, reason, coverage)
        if compared and (of_base or not reference):
            name = f"log-probabilities of {suite}"
            return _not_judged(name, limit, "head reports fewer of them than base", coverage)
        reason = "base reports no log-probabilities of likely tokens"
        return _not_judged(name, limit, reason, coverage)
    zeros = np.zeros(len(values))
    interval = mean_difference_interval(
        zeros, values, seed=answers.paired.asking.seed, confidence=1 - 2 * alpha
    )
    if interval.low > mean:
        verdict = _Verdict(FAIL, f"is {interval.estimate:.3g} nats a token")
    elif interval.high <= mean:
        verdict = _Verdict(PASS, "")
    else:
        verdict = _Verdict(AMBIGUOUS, "the limit is within its interval")
    return GateLimit(
        check=name,
        limit=limit,
        outcome=verdict.outcome,
        reason=verdict.reason,
        base=float(np.mean(of_base)) if of_base else None,
        value=interval.estimate,
        change=None,
        low=interval.low,
        high=interval.high,
        unit="nats",
        coverage=coverage,
    )


def _means(divergences: Mapping[int, tuple[float, int] | None]) -> list[float]:
    return [found[0] / found[1] for found in divergences.values() if found is not None]


def _interval(base: Floats, head: Floats, seed: int) -> Interval:
    if set(base) | set(head) <= {0.0, 1.0}:
        return item_difference(base, head).interval
    if base.size < 2:
        change = float(head.mean() - base.mean())
        return Interval(change, -1.0, 1.0)
    return mean_difference_interval(base, head, seed=seed)


def _missing(answers: PairedAnswers) -> str:
    """Say why not all planned questions have two answers; empty: they have, as far as asked."""
    unanswered = "; ".join(filter(None, map(answers.unanswered, (BASE, HEAD))))
    return answers.failure or unanswered


def _coverage(answers: PairedAnswers) -> str:
    count, planned = len(answers.both), len(answers.order)
    questions = f"{count:,} of {planned:,} questions" if count < planned else f"{count:,} questions"
    samples = answers.paired.asking.samples
    return questions if samples == 1 else f"{questions}, {samples} samples each"


def _not_judged(name: str, limit: str, reason: str, coverage: str) -> GateLimit:
    return GateLimit(
        check=name,
        limit=limit,
        outcome=NOT_JUDGED,
        reason=reason,
        base=None,
        value=None,
        change=None,
        low=None,
        high=None,
        unit="points",
        coverage=coverage,
    )

"""The same questions to two engines, in blocks, until a test decides or none are left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flexq_bench.served.client import Answer, Client, Limits, Request, TokenLogprob
from flexq_bench.served.divergence import answer_divergence
from flexq_bench.served.errors import EngineError
from flexq_bench.served.questions import (
    FAULTS,
    Asking,
    OnQuestion,
    QuestionSuite,
    Scored,
    faults_of,
)
from flexq_bench.served.turns import BASE, HEAD, Turns
from flexq_bench.stats.planned_mean import Decision
from flexq_bench.stats.sequential_loss import (
    Floats,
    LossTest,
    decide_floor,
    decide_loss,
    look_counts,
)

_OPEN = Decision.OPEN
_SEED_PROBES = 12  # some samples are equal by chance
_DEATH_S, _DEATH_POLLS = 1.0, 10  # between the end of a server's sockets and its own
_MAX_UNANSWERED = 0.5  # of a block: beyond, the engine does not answer


@dataclass(frozen=True, slots=True)
class PairedSuite:
    """A suite, how it is asked, and the test of its scores.

    faults: the test of the increase of the share of each kind of faulty answers; None: none is
    judged. most: questions; None: all. at_least: head's least accepted score; None: any.
    referenced: questions whose predictions are kept, to compare them with a reference; 0: head's
    are compared with base's.
    """

    suite: QuestionSuite
    asking: Asking
    test: LossTest
    faults: LossTest | None = None
    most: int | None = None
    at_least: float | None = None
    referenced: int = 0

    @property
    def planned(self) -> int:
        """The most questions that are asked."""
        return min(self.suite.count, self.most or self.suite.count)


@dataclass(slots=True)
class PairedAnswers:
    """Questions of a suite and their answers so far. scored: by engine and question's index.

    order: in which questions are asked. looks: numbers of questions at which the tests look.
    decision: of the loss of score; floor: of the least score; faults: of each kind of faulty
    answers. predictions: kept for a reference. divergences: of each engine from the reference;
    without one, of head from base where base gives log-probabilities, see `answer_divergence`;
    None: an engine gives none. failure: one line on why an engine ended it; empty: none did.
    """

    paired: PairedSuite
    order: tuple[int, ...]
    looks: tuple[int, ...]
    scored: dict[str, dict[int, Scored]] = field(default_factory=lambda: {BASE: {}, HEAD: {}})
    decision: Decision = Decision.OPEN
    floor: Decision = Decision.OPEN
    faults: dict[str, Decision] = field(
        default_factory=lambda: dict.fromkeys(FAULTS, Decision.OPEN)
    )
    predictions: dict[str, dict[int, tuple[TokenLogprob, ...]]] = field(
        default_factory=lambda: {BASE: {}, HEAD: {}}
    )
    divergences: dict[str, dict[int, tuple[float, int] | None]] = field(
        default_factory=lambda: {BASE: {}, HEAD: {}}
    )
    failure: str = ""

    def compare(self, indices: Sequence[int]) -> None:
        """Compare the predictions of these questions, and drop them, which are most of the data."""
        for i in indices:
            base, head = (self.scored[name][i].answers[0] for name in (BASE, HEAD))
            if self.paired.referenced:
                if len(self.predictions[HEAD]) < self.paired.referenced:
                    self.predictions[BASE][i] = base.logprobs
                    self.predictions[HEAD][i] = head.logprobs
            elif any(token.top for token in base.logprobs):
                self.divergences[HEAD][i] = answer_divergence(base, head)
            for scored in self.scored.values():
                if any(answer.logprobs for answer in scored[i].answers):
                    kept = tuple(replace(answer, logprobs=()) for answer in scored[i].answers)
                    scored[i] = replace(scored[i], answers=kept)

    @property
    def both(self) -> list[tuple[Scored, Scored]]:
        """The pairs that have scores, in the order of asking."""
        base, head = self.scored[BASE], self.scored[HEAD]
        pairs = [(base[i], head[i]) for i in self.order if i in base and i in head]
        return [pair for pair in pairs if all(scored.score is not None for scored in pair)]

    @property
    def losses(self) -> Floats:
        """[n]: base - head by question, in the order of asking."""
        return np.array([_score(base) - _score(head) for base, head in self.both])

    def more_faults(self, kind: str) -> Floats:
        """[n]: head - base of the share of samples with a fault, by question, as `losses`."""
        pairs = [(faults_of(base)[kind], faults_of(head)[kind]) for base, head in self.both]
        return np.array([head - base for base, head in pairs])

    def look(self) -> None:
        """Take those decisions that are open, if all questions of a look are answered."""
        samples = self.paired.asking.samples
        losses = self.losses
        if losses.size not in self.looks:  # with questions missing, it is none that was planned
            return
        if self.decision is Decision.OPEN:
            self.decision = decide_loss(self.paired.test, losses, looks=self.looks, samples=samples)
        floor = self.paired.at_least
        if floor is not None and self.floor is Decision.OPEN:
            scores = [_score(head) for _, head in self.both]
            self.floor = decide_floor(self.paired.test, scores, floor=floor, looks=self.looks)
        for kind, known in self.faults.items():
            if self.paired.faults is not None and known is Decision.OPEN:
                more = self.more_faults(kind)
                self.faults[kind] = decide_loss(
                    self.paired.faults, more, looks=self.looks, samples=samples
                )

    @property
    def is_decided(self) -> bool:
        """True if nothing more need be asked: head fails, or nothing is open."""
        of_faults = [] if self.paired.faults is None else list(self.faults.values())
        of_floor = [] if self.paired.at_least is None else [self.floor]
        decisions = (self.decision, *of_floor, *of_faults)
        return Decision.ABOVE in decisions or Decision.OPEN not in decisions

    def unanswered(self, name: str) -> str:
        """Count an engine's questions without an answer; empty: there are none."""
        failures = [scored.failure for scored in self.scored[name].values()]
        counts = Counter(failure.outcome.value for failure in failures if failure is not None)
        if not counts:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        first = next(failure.detail for failure in failures if failure is not None)
        return (
            f"{name}: {sum(counts.values())} of {len(failures)} questions without an answer "
            f"({kinds}: {first})"
        )


def begin(paired: PairedSuite, *, seed: int) -> PairedAnswers:
    """Return a suite's questions in a random order, none of them asked yet."""
    order = np.random.default_rng(seed).permutation(paired.suite.count)[: paired.planned]
    return PairedAnswers(paired, tuple(map(int, order)), look_counts(paired.planned))


def ask_both(
    turns: Turns,
    answers: PairedAnswers,
    *,
    limits: Limits,
    key: str | None = None,
    on_question: OnQuestion = lambda: None,
) -> None:
    """Put a suite to both engines in blocks, until all is decided, and add what they answer.

    An engine that does not start, dies or does not answer ends it; what was answered stays, and
    `failure` has the reason.
    """
    looks = answers.looks
    for block, (start, end) in enumerate(zip((0, *looks[:-1]), looks, strict=True)):
        indices = answers.order[start:end]
        try:
            turns.place(block)
            for name in turns.order(block):
                scored = _ask(turns, name, answers.paired, indices, limits, key, on_question)
                answers.scored[name] |= dict(zip(indices, scored, strict=True))
                _check_answered(turns, name, scored)
        except EngineError as error:
            answers.failure = str(error)
            return
        answers.compare(indices)
        answers.look()
        if answers.is_decided:
            return


def ignores_seed(turns: Turns, name: str, *, limits: Limits, key: str | None = None) -> bool:
    """Return True if equal requests with one seed, sampled one by one, have different answers."""
    engine = turns.engine(name)
    request = Request("Once upon a time", 24, temperature=1.0, seed=1)

    async def asked() -> list[Answer]:
        async with Client(engine.url, engine.model, limits=limits, key=key) as client:
            return [await client.send(request) for _ in range(_SEED_PROBES)]

    answers = asyncio.run(asked())
    return len({answer.text for answer in answers if answer.outcome.is_answer}) > 1


def _ask(
    turns: Turns,
    name: str,
    paired: PairedSuite,
    indices: Sequence[int],
    limits: Limits,
    key: str | None,
    on_question: OnQuestion,
) -> list[Scored]:
    engine = turns.engine(name)

    async def asked() -> list[Scored]:
        async with Client(engine.url, engine.model, limits=limits, key=key) as client:
            return await paired.suite.ask(client, indices, paired.asking, on_question)

    return asyncio.run(asked())


def _check_answered(turns: Turns, name: str, scored: Sequence[Scored]) -> None:
    """Raise EngineError if the engine died, or left most of a block unanswered."""
    failures = [answer.failure for answer in scored if answer.failure is not None]
    if not failures:
        return
    for _ in range(_DEATH_POLLS):
        turns.engine(name)  # raises if it died
        time.sleep(_DEATH_S / _DEATH_POLLS)
    if len(failures) > _MAX_UNANSWERED * len(scored):
        first = failures[0]
        raise EngineError(
            f"{name}: no answer to {len(failures)} of {len(scored)} questions: "
            f"{first.outcome.value}, {first.detail}"
        )


def _score(scored: Scored) -> float:
    return 0.0 if scored.score is None else scored.score

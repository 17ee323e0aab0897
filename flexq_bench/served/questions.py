"""Questions with answers from a file of JSON lines, and what an engine made of them.

A line has `prompt` (a text, or a list of chat messages) and `answer` (a text, a number, or a list
of these that are all right); optional are `checker` and `max_tokens`. With the checker `code`,
`answer` is code that tests the function which the prompt asks for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.runs.text_files import read_text
from flexq_bench.served.checkers import CHECKERS, CODE, CodeRunner, check_answers, is_right
from flexq_bench.served.client import Answer, Client, Outcome, Request, send_all

_MAX_BYTES = 1 << 28  # of a file
_MAX_QUESTIONS = 1_000_000
OnQuestion = Callable[[], None]
_GIVE_UP_AFTER = 8  # requests in a row without an answer
_RETRIES = 4  # of a request that the engine was too busy for
_FAULTS = (Outcome.EMPTY, Outcome.CUT_OFF, Outcome.LOOPING, Outcome.MALFORMED)
_UNUSABLE = (Outcome.EMPTY, Outcome.MALFORMED)


@dataclass(frozen=True, slots=True)
class Asking:
    """Settings of requests. samples: answers to each question; more than one needs a
    temperature above 0. chat: prompts are messages of a user. logprobs: of so many tokens. extra:
    more fields of each request.
    """

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    samples: int = 1
    stop: tuple[str, ...] = ()
    chat: bool = False
    logprobs: int | None = None
    seed: int = 0
    concurrency: int = 32
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        """Settings that results depend on, as stored with them."""
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "samples": self.samples,
            "stop": list(self.stop),
            "chat": self.chat,
        }


@dataclass(frozen=True, slots=True)
class Scored:
    """All samples of one question. score: share of right ones; None: one has no answer at all.

    answers: as they arrived; of a suite that scores by itself those that it asked for.
    """

    score: float | None
    answers: tuple[Answer, ...]

    def share_of(self, fault: Outcome) -> float:
        """The share of samples with a fault."""
        return sum(answer.outcome is fault for answer in self.answers) / len(self.answers)

    @property
    def failure(self) -> Answer | None:
        """The first request that was not answered; None: all were."""
        return next((a for a in self.answers if not a.outcome.is_answer), None)


class QuestionSuite:
    """Questions that are put to engines. data_hash: SHA-256 of questions and answers.

    A suite implements `request` and `scored`, or `ask`.
    """

    name: str
    metric: str
    data_hash: str
    count: int
    generates = True  # False: it compares log-probabilities of texts

    def request(self, index: int, asking: Asking) -> Request:
        """Return the request whose answer is a question's first one, to compare predictions."""
        raise NotImplementedError

    async def ask(
        self,
        client: Client,
        indices: Sequence[int],
        asking: Asking,
        on_question: Callable[[], None],
    ) -> list[Scored]:
        """Put the questions of these indices to an engine; one result each, in their order."""
        requests = [self.requests(index, asking) for index in indices]
        answers = await send_questions(client, requests, asking.concurrency, on_question)
        return list(map(self.scored, indices, answers))

    def requests(self, index: int, asking: Asking) -> list[Request]:
        """Return all that is asked of an engine for a question: a request for each sample."""
        asked = self.request(index, asking)
        seeds = (question_seed(asking.seed, index, sample) for sample in range(asking.samples))
        return [replace(asked, seed=seed) for seed in seeds]

    def scored(self, index: int, answers: tuple[Answer, ...]) -> Scored:
        """Return the score of a question. answers: to its requests, in their order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _Question:
    prompt: str | tuple[Mapping[str, str], ...]
    answers: tuple[str, ...]
    checker: str
    max_tokens: int | None = None

    def request(self, asking: Asking) -> Request:
        prompt = self.prompt
        if asking.chat and isinstance(prompt, str):
            prompt = ({"role": "user", "content": prompt},)
        return Request(
            prompt,
            self.max_tokens or asking.max_tokens,
            temperature=asking.temperature,
            top_p=asking.top_p,
            stop=asking.stop,
            logprobs=asking.logprobs,
            extra=asking.extra,
        )

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else ""


class QuestionFile(QuestionSuite):
    """A file of JSON lines. checker: of lines that name none.

    Raises UsageError for a line that is no question, and SandboxError if code can't run here.
    """

    metric = "right"

    def __init__(self, name: str, path: Path, checker: str | None = None) -> None:
        text = read_text(str(path), "a file of questions", most_bytes=_MAX_BYTES)
        self.name = name
        known: dict[str, _Question] = {}  # a repeated one says nothing more
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                try:
                    question = _question(line, checker)
                except UsageError as error:
                    raise UsageError(f"{path}, line {number}: {error}") from error
                known.setdefault(repr(question), question)
        self._questions = list(known.values())
        if not 0 < len(self._questions) <= _MAX_QUESTIONS:
            raise UsageError(f"{path} has {len(self._questions):,} questions: give 1 to 1,000,000")
        self.count = len(self._questions)
        self.data_hash = hashlib.sha256(f"{checker}\n{text}".encode()).hexdigest()
        runs_code = any(question.checker == CODE for question in self._questions)
        self._code = CodeRunner() if runs_code else None

    def request(self, index: int, asking: Asking) -> Request:
        """See QuestionSuite."""
        return self._questions[index].request(asking)

    def scored(self, index: int, answers: tuple[Answer, ...]) -> Scored:
        """See QuestionSuite."""
        return score_texts(answers, partial(self._is_right, self._questions[index]))

    def _is_right(self, question: _Question, text: str) -> bool:
        if self._code is not None and question.checker == CODE:
            return self._code.is_right(text, question.text, question.answers)
        return is_right(question.checker, text, question.answers)


def score_texts(answers: tuple[Answer, ...], score: Callable[[str], float]) -> Scored:
    """Return the mean score of an answer's samples: 0 of texts that nobody can use."""
    if any(not answer.outcome.is_answer for answer in answers):
        return Scored(None, answers)
    total = sum(0.0 if answer.outcome in _UNUSABLE else score(answer.text) for answer in answers)
    return Scored(total / len(answers), answers)


def faults_of(scored: Scored) -> dict[str, float]:
    """Return the share of samples with each fault that an answer may have."""
    return {fault.value: scored.share_of(fault) for fault in _FAULTS}


FAULTS = tuple(fault.value for fault in _FAULTS)


async def send_questions(
    client: Client,
    requests: Sequence[Sequence[Request]],
    concurrency: int,
    on_question: Callable[[], None],
) -> list[tuple[Answer, ...]]:
    """Return the answers to the requests of each question. on_question: called as it has all.

    An engine that is too busy is asked again, one that does not answer is given up.
    """
    places = [number for number, own in enumerate(requests) for _ in own]
    left = [len(own) for own in requests]

    def arrived(index: int, _: Answer) -> None:
        left[places[index]] -= 1
        if not left[places[index]]:
            on_question()

    answers = iter(
        await send_all(
            client,
            [request for own in requests for request in own],
            concurrency=concurrency,
            retries=_RETRIES,
            give_up_after=_GIVE_UP_AFTER,
            on_answer=arrived,
        )
    )
    return [tuple(islice(answers, len(own))) for own in requests]


def question_seed(seed: int, index: int, sample: int) -> int:
    """Return a seed of a request, the same for both engines."""
    digest = hashlib.blake2b(f"{seed} {index} {sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def _question(line: str, checker: str | None) -> _Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"no JSON: {error}") from error
    if not isinstance(row, dict) or "prompt" not in row or "answer" not in row:
        raise UsageError("give an object with prompt and answer")
    kind = row.get("checker", checker)
    if kind not in CHECKERS:
        raise UsageError(f"checker is {kind!r}: give one of {', '.join(CHECKERS)}")
    given = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    is_text = [isinstance(v, str | int | float) and not isinstance(v, bool) for v in given]
    if not given or not all(is_text):
        raise UsageError("answer must be a text, a number, or a list of these")
    answers = tuple(map(str, given))
    check_answers(kind, answers)
    most = row.get("max_tokens")
    if most is not None and not (isinstance(most, int) and most >= 1):
        raise UsageError(f"max_tokens must be an integer of at least 1, got {most!r}")
    return _Question(_prompt(row["prompt"]), answers, kind, most)


def _prompt(value: object) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str) and value:
        return value
    messages = value if isinstance(value, list) else []
    for message in messages:
        is_message = isinstance(message, dict) and isinstance(message.get("content"), str)
        if not is_message or not isinstance(message.get("role"), str):
            messages = []
            break
    if not messages:
        raise UsageError("prompt must be a text, or messages with role and content")
    return tuple({"role": m["role"], "content": m["content"]} for m in messages)

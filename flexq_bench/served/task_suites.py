"""Tasks of lm-eval as questions: its prompts, filters and metrics, with the answers of an engine.

A task that generates is asked with its stop strings. One that compares log-probabilities, as those
of multiple choice, needs an engine that reports those of a prompt (`echo`, as vLLM and SGLang do).
Tokens of a continuation are those after as many as its context has alone, as in lm-eval.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.tasks import load_requests, task_name
from flexq_bench.errors import UsageError
from flexq_bench.served.client import Answer, Outcome, Request
from flexq_bench.served.questions import (
    Asking,
    QuestionSuite,
    Scored,
    score_texts,
)

_GENERATE, _LIKELIHOOD = "generate_until", "loglikelihood"
_NO_ECHO = "the engine reports no log-probabilities of a prompt (echo)"
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")  # names of one generation argument


@dataclass(frozen=True, slots=True)
class _Question:
    """A document of a task, with lm-eval's requests about it."""

    task: Any  # lm_eval.api.task.Task
    instances: tuple[Any, ...]  # lm_eval.api.instance.Instance

    @property
    def generates(self) -> bool:
        return bool(self.instances[0].request_type == _GENERATE)


class TaskSuite(QuestionSuite):
    """A task or group of lm-eval. task, data, few_shot: as in accuracy.tasks.run_task.

    metric: for example `exact_match,flexible-extract`; None: the task's first metric, by its first
    filter. Raises UsageError for a task that can't be judged question by question, and as run_task.
    """

    def __init__(
        self,
        task: str,
        *,
        data: Path | None = None,
        few_shot: int | None = None,
        metric: str | None = None,
        seed: int = 0,
    ) -> None:
        tasks = load_requests(task, data=data, few_shot=few_shot, seed=seed)
        self.name = task_name(task)
        self._questions = [
            question for own in tasks.values() for question in _questions(self.name, own)
        ]
        self.metric = _metric(self.name, next(iter(tasks.values())), metric)
        self.count = len(self._questions)
        self.generates = all(question.generates for question in self._questions)
        arguments = [
            instance.arguments for asked in self._questions for instance in asked.instances
        ]
        targets = [asked.task.doc_to_target(asked.instances[0].doc) for asked in self._questions]
        text = repr((self.metric, arguments, targets))
        self.data_hash = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()

    def request(self, index: int, asking: Asking) -> Request:
        """See QuestionSuite; of log-probabilities, a text's continuation is the answer."""
        question = self._questions[index]
        if not question.generates:
            return Request(_split(question.instances[0])[0], 1)
        prompt, settings = question.instances[0].arguments
        until = settings.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        most = next((int(settings[key]) for key in _LENGTHS if key in settings), asking.max_tokens)
        return Request(
            ({"role": "user", "content": prompt},) if asking.chat else prompt,
            most,
            temperature=asking.temperature,
            top_p=asking.top_p,
            stop=tuple(s for s in (*stop, *asking.stop) if s),
            logprobs=asking.logprobs,
            extra=asking.extra,
        )

    def requests(self, index: int, asking: Asking) -> list[Request]:
        """See QuestionSuite; of log-probabilities, texts to be repeated with theirs."""
        question = self._questions[index]
        if question.generates:
            return super().requests(index, asking)
        # Engines of today generate a token at least, which is left out.
        most_likely = max(1, asking.logprobs or 1)
        texts = [
            *_contexts(question),
            *("".join(_split(instance)) for instance in question.instances),
        ]
        return [
            Request(text, 1, logprobs=most_likely, echo=True, extra=asking.extra) for text in texts
        ]

    def scored(self, index: int, answers: tuple[Answer, ...]) -> Scored:
        """See QuestionSuite. Raises UsageError for a metric that is not 0 or 1 by question."""
        question = self._questions[index]
        if question.generates:
            return score_texts(answers, lambda text: self._score(question, [text]))
        return self._compared(question, answers)

    def _compared(self, question: _Question, answers: tuple[Answer, ...]) -> Scored:
        """Score a document by the log-probabilities of continuations."""
        texts = _contexts(question)
        lengths = dict(zip(texts, map(_prompt_length, answers), strict=False))
        own = [
            _continuation(answer, lengths.get(_split(instance)[0], 0))
            for instance, answer in zip(question.instances, answers[len(texts) :], strict=True)
        ]
        known = (*own, *map(_without_text, answers[: len(texts)]))
        if any(not answer.outcome.is_answer for answer in known):
            return Scored(None, known)
        results = [
            (
                math.fsum(token.logprob or 0.0 for token in answer.logprobs),
                all(
                    token.logprob is not None
                    and token.logprob >= max(token.top.values(), default=-math.inf)
                    for token in answer.logprobs
                ),
            )
            for answer in own
        ]
        return Scored(self._score(question, results), known)

    def _score(self, question: _Question, results: Sequence[object]) -> float:
        """Return lm-eval's metric of a document, 0 or 1. results: for each of its instances."""
        for instance, result in zip(question.instances, results, strict=True):
            instance.resps, instance.filtered_resps = [result], {}
        question.task._instances = list(question.instances)
        question.task.apply_filters()
        metric, _, wanted = self.metric.partition(",")
        first = question.instances[0].filtered_resps
        chosen = wanted or next(iter(first))
        filtered = [instance.filtered_resps[chosen] for instance in question.instances]
        values = question.task.process_results(question.instances[0].doc, filtered)
        value = values.get(metric)
        if not isinstance(value, bool | int | float) or float(value) not in (0.0, 1.0):
            binary = [name for name, value in values.items() if value in (0, 1)]
            raise UsageError(
                f"{self.name}: {metric} of a question is {value!r:.40}, not 0 or 1: give metric, "
                f"one of {', '.join(binary) or 'another task'}"
            )
        return float(value)


def _questions(name: str, task: Any) -> list[_Question]:
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        if instance.request_type not in (_GENERATE, _LIKELIHOOD) or instance.repeats != 1:
            what = "repeats" if instance.repeats != 1 else instance.request_type
            raise UsageError(f"{name} has {what}: an engine is asked each question once (samples)")
        if len(instance.arguments) > 2:
            raise UsageError(f"{name} has images or sound: give a task of text")
        by_document.setdefault(instance.doc_id, []).append(instance)
    return [_Question(task, tuple(instances)) for instances in by_document.values()]


def _metric(name: str, task: Any, wanted: str | None) -> str:
    """Check a metric, or choose one."""
    better = task.higher_is_better()
    known = [metric for metric, is_better in better.items() if is_better]
    metric = wanted or next(iter(known), "")
    if metric.partition(",")[0] not in known:
        given = f"no metric {metric}" if metric else "no metric that is better higher"
        raise UsageError(f"{name} has {given}: it has {', '.join(better) or 'none'}")
    filters = [task_filter.name for task_filter in task._filters]
    chosen = metric.partition(",")[2]
    if chosen and chosen not in filters:
        raise UsageError(f"{name} has no filter {chosen}: it has {', '.join(filters)}")
    return metric if chosen or len(filters) < 2 else f"{metric},{filters[0]}"


def _split(instance: Any) -> tuple[str, str]:
    """Context and continuation. Blanks between both belong to the latter, as in lm-eval."""
    context, continuation = instance.arguments
    rest = context.rstrip()
    return rest, context[len(rest) :] + continuation


def _contexts(question: _Question) -> list[str]:
    """Return the texts whose numbers of tokens are needed, without repetition."""
    return list(
        dict.fromkeys(c for c in (_split(instance)[0] for instance in question.instances) if c)
    )


def _prompt_length(answer: Answer) -> int:
    """Tokens of a prompt that is repeated; without a report, all but the generated one."""
    reported = answer.prompt_tokens
    return max(0, len(answer.logprobs) - 1) if reported is None else reported


def _without_text(answer: Answer) -> Answer:
    """Return an answer whose generated token is not looked at."""
    if not answer.outcome.is_answer:
        return answer
    return replace(answer, outcome=Outcome.OK, text="", detail="", logprobs=())


def _continuation(answer: Answer, start: int) -> Answer:
    """Return the answer with the tokens of its prompt from `start` only."""
    length = _prompt_length(answer)
    own = answer.logprobs[start:length]
    has_own = len(answer.logprobs) >= max(length, start, 1)
    if answer.outcome.is_answer and not (
        has_own and all(t.logprob is not None for t in own[0 if start else 1 :])
    ):
        return replace(answer, outcome=Outcome.REFUSED, detail=_NO_ECHO, logprobs=())
    return replace(_without_text(answer), logprobs=own)

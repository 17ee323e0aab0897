"""Tasks of lm-eval, asked of an engine."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.served.client import Client, Outcome
from flexq_bench.served.engines import engine, started
from flexq_bench.served.questions import Asking, Scored
from flexq_bench.served.task_suites import TaskSuite

pytestmark = pytest.mark.slow
Command = Callable[[str], str]
_COUNT = 24
_GENERATING = """
output_type: generate_until
doc_to_text: "{{question}} Calculate:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question"], max_gen_toks: 40}
filter_list:
  - name: first
    filter:
      - {function: regex, regex_pattern: "(\\\\d+)"}
      - {function: take_first}
  - name: final
    filter:
      - {function: regex, regex_pattern: "answer is (\\\\d+)"}
      - {function: take_first}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
_CHOOSING = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: ["one", "two words", "three of them"]
doc_to_target: "{{['one', 'two words', 'three of them'].index(answer)}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A task file with local data, and the answers for a server."""

    def written(body: str, answers: tuple[str, ...]) -> tuple[Path, Path]:
        rows = [
            {"question": f"Question {i}: what?", "answer": answers[i % len(answers)]}
            for i in range(_COUNT)
        ]
        data, known = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        known.write_text(
            "".join(
                json.dumps({"prompt": row["question"], "answer": row["answer"]}) + "\n"
                for row in rows
            )
        )
        file = tmp_path / "mine.yaml"
        head = f"""
        task: mine
        dataset_path: json
        dataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {tmp_path}/cache}}
        test_split: test
        """
        file.write_text(textwrap.dedent(head) + body)
        return file, known

    return written


def _asked(command: str, suite: TaskSuite, **asking: object) -> list[Scored]:
    async def ask(url: str, model: str) -> list[Scored]:
        async with Client(url, model) as client:
            asked = Asking(**asking)  # type: ignore[arg-type]
            return await suite.ask(client, range(suite.count), asked, lambda: None)

    with started(engine("base", command)) as running:
        return asyncio.run(ask(running.url, running.model))


@pytest.mark.parametrize("metric", ["final", "first"])
def test_generated_answers_are_filtered_and_scored(command: Command, task, metric):
    file, known = task(_GENERATING, ("7", "12", "345"))
    suite = TaskSuite(str(file), metric=f"exact_match,{metric}")

    scored = _asked(command(f"--accuracy 1 --answers {known}"), suite)

    assert (suite.count, suite.name) == (_COUNT, "mine")
    assert [one.score for one in scored] == [1.0] * _COUNT
    lost = _asked(command(f"--accuracy 1 --lose-share 1 --answers {known}"), suite, samples=1)
    assert [one.score for one in lost] == [0.0] * _COUNT


def test_choices_are_scored_by_log_probabilities(command: Command, task):
    file, known = task(_CHOOSING, ("one", "two words", "three of them"))
    suite = TaskSuite(str(file))

    scored = _asked(command(f"--accuracy 1 --answers {known}"), suite, logprobs=1)

    assert [one.score for one in scored] == [1.0] * _COUNT
    assert all(answer.outcome is Outcome.OK for one in scored for answer in one.answers)
    tokens = ["".join(t.token for t in answer.logprobs) for answer in scored[0].answers[:3]]
    assert tokens == [" one", " two words", " three of them"]


@pytest.mark.parametrize("option", ["--no-echo", "--no-logprobs"])
def test_choices_without_log_probabilities_have_no_score(command: Command, task, option):
    file, known = task(_CHOOSING, ("one", "two words"))

    scored = _asked(command(f"{option} --answers {known}"), TaskSuite(str(file)))

    assert {one.score for one in scored} == {None}
    failure = scored[0].failure
    assert failure is not None
    assert "log-probabilities of a prompt" in failure.detail


@pytest.mark.parametrize(
    ("metric", "word"), [("bleu", "no metric bleu"), ("exact_match,last", "no filter last")]
)
def test_unknown_metric_of_a_task_is_named(task, metric: str, word: str):
    file, _ = task(_GENERATING, ("7",))

    with pytest.raises(UsageError, match=word):
        TaskSuite(str(file), metric=metric)

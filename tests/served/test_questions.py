"""Files of questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flexq_bench.served.questions import QuestionFile


def test_repeated_question_counts_once(questions: Callable[[int], Path]):
    path = questions(5)
    path.write_text(path.read_text() * 3)

    assert QuestionFile("five", path, "number").count == 5

"""Checkers of answers."""

from __future__ import annotations

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.measure.sandbox import KINDS, obstacle
from flexq_bench.served.checkers import CodeRunner, check_answers, is_right


@pytest.mark.parametrize(
    ("checker", "text", "answer", "right"),
    [
        ("exact", " Paris \n", "Paris", True),
        ("exact", "Paris, France", "Paris", False),
        ("number", "3 + 4 = 7, so the answer is 1,024.", "1024", True),
        ("number", "She has 12 apples.\n#### 18\nThen 5 more", "18", True),
        ("number", "It is 0.50", "0.5", True),
        ("number", "\\boxed{-3} is negative", "-3", True),
        ("number", "The answer is 7", "8", False),
        ("number", "none", "8", False),
        ("number", "The answer is 3/4", "0.75", True),
        ("number", "The answer is 3/4", "1/4", False),
        ("number", "the temperature is -$1,200.50", "-1200.5", True),
        ("number", "It takes 3-4 hours", "4", True),
        ("number", "The answer is 1/0", "0", False),
        ("choice", "A cat is an animal, so B", "B", True),
        ("choice", "I think that it's C", "C", True),
        ("choice", "A is right", "A", True),
        ("choice", "(B) since A is wrong", "B", True),
        ("choice", "A is tempting, but the answer is C.", "C", True),
        ("choice", "Definitely", "D", False),
        ("regex", "in 1969, they", r"\b1969\b", True),
        ("regex", "in 11969", r"\b1969\b", False),
    ],
)
def test_text_is_checked(checker: str, text: str, answer: str, right: bool):
    assert is_right(checker, text, (answer,)) is right


def test_pattern_that_takes_forever_is_no_match():
    assert not is_right("regex", "a" * 200, ("(a+)+b",))


@pytest.mark.parametrize(("checker", "answer"), [("number", "x"), ("choice", "Z"), ("regex", "(")])
def test_answer_that_nothing_matches_is_refused(checker: str, answer: str):
    with pytest.raises(UsageError):
        check_answers(checker, [answer])


@pytest.mark.skipif(all(map(obstacle, KINDS)), reason="no sandbox works here")
@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("```python\ndef add(a, b):\n    return a + b\n```", True),
        ("    return a + b\n", True),
        ("    return a - b\n", False),
        ("    import os; os._exit(0)\n", False),
        ("    open('/tmp/../etc/x', 'w')\n    return a + b\n", False),
    ],
)
def test_code_runs_in_sandbox(text: str, right: bool):
    runner = CodeRunner()

    assert runner.is_right(text, "def add(a, b):\n", ("assert add(2, 3) == 5",)) is right

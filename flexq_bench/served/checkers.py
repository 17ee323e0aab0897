"""Checkers of answers: exact, number, choice, regex, and code that runs in the sandbox."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal

from flexq_bench.errors import UsageError
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.launcher import FreshProcess
from flexq_bench.measure.sandbox import Kind, Sandbox, SandboxLimits, required_kind

CODE = "code"
_MAX_TEXT = 50_000  # characters of an answer that are looked at
_CODE_S = 20.0
_NEVER_PASSES = "raise AssertionError"
_LIMITS = SandboxLimits(memory_bytes=1 << 31, files_bytes=1 << 26, processes=64)
_REGEX_S = 2.0  # for one answer
# A sign is none within a word or a range; it may be before a currency.
_NUMBER = re.compile(
    r"(?:(?<!\w)(?P<sign>[-+−])[$€£]?)?"
    r"(?P<size>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?|\.\d+)"
    r"(?:/(?P<divisor>\d+))?"
)
_ANNOUNCED = re.compile(r"####|\\boxed\s*\{|answer\s*(?:is|:|=)", re.IGNORECASE)
# An article, or a person who speaks, is no choice.
_LETTER = re.compile(r"\b(?![AI][ \t]+(?!is\b|because\b)[a-z]|I['’])([A-J])\b")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)

Check = Callable[[str, tuple[str, ...]], bool]


def check_exact(text: str, answers: tuple[str, ...]) -> bool:
    """Return True if the text is one of the answers, but for blanks around and between words."""
    return " ".join(text.split()) in {" ".join(answer.split()) for answer in answers}


def check_number(text: str, answers: tuple[str, ...]) -> bool:
    """Return True if the text's final number is one of the answers.

    It is the first one after the last `####`, `\\boxed{` or `answer is`, else the last one.
    """
    places = [match.end() for match in _ANNOUNCED.finditer(text)]
    announced = _numbers(text[places[-1] :].partition("\n")[0]) if places else []
    answered = announced[0] if announced else next(reversed(_numbers(text)), None)
    return answered is not None and answered in [
        n for answer in answers for n in _numbers(answer)[-1:]
    ]


def check_choice(text: str, answers: tuple[str, ...]) -> bool:
    """Return True if the text's letter A … J is one of the answers.

    It is the first one after the last `answer is`, else the first one of the text.
    """
    places = [match.end() for match in _ANNOUNCED.finditer(text)]
    for part in ([text[places[-1] :]] if places else []) + [text]:
        if match := _LETTER.search(part):
            return match[1] in {answer.strip(" ().:").upper() for answer in answers}
    return False


def check_regex(text: str, answers: tuple[str, ...]) -> bool:
    """Return True if one of the answers, as regular expressions, occurs in the text.

    False also if the search takes longer than 2 s: some patterns take forever on some texts.
    """
    try:
        with _time_limit(_REGEX_S):
            return any(re.search(answer, text) for answer in answers)
    except TimeoutError:
        return False


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time, if it runs in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


TEXT_CHECKS: Mapping[str, Check] = {
    "exact": check_exact,
    "number": check_number,
    "choice": check_choice,
    "regex": check_regex,
}
CHECKERS = (*TEXT_CHECKS, CODE)


def is_right(checker: str, text: str, answers: tuple[str, ...]) -> bool:
    """Return True if an answer's text is right by a checker of TEXT_CHECKS."""
    return TEXT_CHECKS[checker](text[-_MAX_TEXT:], answers)


def check_answers(checker: str, answers: Sequence[str]) -> None:
    """Raise UsageError for answers that no text can match."""
    for answer in answers:
        if checker == "number" and not _numbers(answer):
            raise UsageError(f"the answer {answer!r} has no number")
        if checker == "choice" and not re.fullmatch(r"[A-J]", answer.strip(" ().:").upper()):
            raise UsageError(f"the answer {answer!r} is no letter from A to J")
        if checker == "regex":
            try:
                re.compile(answer)
            except re.error as error:
                raise UsageError(f"the answer {answer!r} is no regex: {error}") from error


class CodeRunner:
    """Runs answers as Python programs in the sandbox. Raises SandboxError if there is none."""

    def __init__(self) -> None:
        self._kind: Kind = required_kind()

    def is_right(self, text: str, prompt: str, tests: tuple[str, ...]) -> bool:
        """Return True if the code of an answer passes its tests, each a program's last lines.

        The code is the text's last block in fences, else the prompt continued by the text. Code
        that ends the program by itself would pass every test, and so also one that always fails:
        then it is wrong.
        """
        blocks = _FENCE.findall(text[-_MAX_TEXT:])
        code = blocks[-1] if blocks else prompt + text[:_MAX_TEXT]
        return all(
            self._ends_well(f"{code}\n\n{test}\n")
            and not self._ends_well(f"{code}\n\n{test}\n{_NEVER_PASSES}\n")
            for test in tests
        )

    def _ends_well(self, program: str) -> bool:
        with (
            clean_environment() as variables,
            tempfile.TemporaryFile() as source,  # there is no file for the program to read
        ):
            source.write(program.encode("utf-8", "replace"))
            source.seek(0)
            sandbox = Sandbox(variables, self._kind, limits=_LIMITS)
            with FreshProcess(
                sandbox.wrap([sys.executable, "-I", "-"]),
                env=variables,
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as process:
                try:
                    return process.wait(_CODE_S) == 0
                except subprocess.TimeoutExpired:
                    return False
                finally:
                    process.signal_group(signal.SIGKILL)


def _numbers(text: str) -> list[Decimal]:
    numbers = []
    for match in _NUMBER.finditer(text[-_MAX_TEXT:]):
        with suppress(ArithmeticError):
            number = Decimal(match["size"].replace(",", "")) / Decimal(match["divisor"] or 1)
            numbers.append(-number if match["sign"] in ("-", "−") else number)
    return numbers

"""Fixtures of engines: a small server of tests, and questions that it answers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_SERVER = Path(__file__).with_name("server.py")


@pytest.fixture(scope="session")
def server(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """The module of the test server."""
    return load_module(_SERVER)


@pytest.fixture(scope="session")
def command() -> Callable[[str], str]:
    """The command line of the test server with more options."""

    def line(options: str = "") -> str:
        return f"{shlex.quote(sys.executable)} {_SERVER} --port {{port}} {options}"

    return line


@pytest.fixture
def questions(tmp_path: Path, server: ModuleType) -> Callable[[int], Path]:
    """A file of so many questions, of which the test server knows the answers."""

    def written(count: int) -> Path:
        path = tmp_path / "questions.jsonl"
        prompts = [f"Question {number}: how many?" for number in range(count)]
        rows = [{"prompt": p, "answer": server.right_answer(p)} for p in prompts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return written

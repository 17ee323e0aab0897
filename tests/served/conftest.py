"""Fixtures of engines: a small server of tests, and questions that it answers."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_SERVER = Path(__file__).with_name("server.py")


@pytest.fixture(scope="session")
def server() -> ModuleType:
    """The module of the test server."""
    spec = importlib.util.spec_from_file_location("server_of_tests", _SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from flexq_bench.workloads.suite import Suite
from flexq_bench.workloads.suites import load_suite

SuiteFromText = Callable[[str], Suite]


@pytest.fixture
def suite_from(tmp_path: Path) -> SuiteFromText:
    """Loads a suite `mine.toml` with the given text."""

    def load(text: str) -> Suite:
        path = tmp_path / "mine.toml"
        path.write_text(dedent(text), encoding="utf-8")
        return load_suite(path)

    return load

from __future__ import annotations

from textwrap import dedent

import pytest

from flexq_bench.workloads.suites import load_suite


@pytest.fixture
def suite_from(tmp_path):
    """Loads a suite `mine.toml` with the given text."""

    def load(text):
        path = tmp_path / "mine.toml"
        path.write_text(dedent(text), encoding="utf-8")
        return load_suite(path)

    return load

"""Fixtures that write a file of another tool and read it."""

from __future__ import annotations

import json

import pytest

from flexq_bench.exchange.external.formats import read_results


@pytest.fixture
def read(tmp_path):
    def write_and_read(format_name, content, name="results", encoding="utf-8"):
        path = tmp_path / name
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding)
        return read_results(format_name, str(path))

    return write_and_read

"""Fixtures that write a file of another tool and read it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flexq_bench.exchange.external.formats import read_results


@pytest.fixture
def read(tmp_path):
    def write_and_read(format_name, content, name="results", encoding="utf-8"):
        path = tmp_path / name
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding)
        parts = list(read_results(format_name, str(path)))
        results = tuple(result for part in parts for result in part.results)
        refused = tuple(one for part in parts for one in part.refused)
        return replace(parts[0], results=results, refused=refused)

    return write_and_read

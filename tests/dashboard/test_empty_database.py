"""Pages of an empty database."""

from __future__ import annotations

import pytest
from page_content import words


@pytest.mark.parametrize(
    ("page", "link", "advice"),
    [
        ("accuracy", {}, ["accuracy --model DIR"]),
        ("alert", {}, ["gate perf"]),
        ("compare", {"kind": "runs"}, ["run smoke"]),
        ("compare", {"kind": "commits"}, ["run smoke"]),
        ("compare", {"kind": "kernels"}, ["run smoke"]),
        ("decode", {}, ["decode llama-7b"]),
        ("engines", {}, ["gate served --base"]),
        ("fleet", {}, ["No worker is alive", "worker"]),
        ("history", {}, ["run smoke"]),
        ("kernels", {}, ["run smoke"]),
        ("kernels", {"view": "heat map"}, ["run smoke"]),
        ("measurement", {}, ["History"]),
        ("home", {}, ["run smoke"]),
        ("pareto", {}, ["accuracy --model DIR --checkpoint FOLDER", "decode FOLDER"]),
        ("results", {}, ["run smoke", "db import"]),
        ("sweep", {}, ["No worker is alive"]),
        ("triage", {}, ["No alert was ever opened"]),
    ],
)
def test_page_of_an_empty_database_says_what_to_do(store, open_page, page, link, advice):
    app = open_page(page, **link)

    text = words(app)
    assert [part for part in advice if part not in text] == []
    assert not app.dataframe

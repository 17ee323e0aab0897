"""Stored text and times as a viewer gets them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from flexq_bench.dashboard.shared.formatting import (
    as_code,
    as_text,
    local_time,
    short_commit,
    time_zone,
)

MOMENT = datetime(2025, 11, 21, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("/tmp/my_file.sqlite", r"/tmp/my\_file\.sqlite"),
        ("[a](http://b)", r"\[a\]\(http\://b\)"),
        ("<b>:red[x]", r"\<b\>\:red\[x\]"),
        ("two\n\n# lines", r"two \# lines"),
    ],
)
def test_escaped_text_has_no_markup_or_line_break(text: str, markdown: str) -> None:
    assert as_text(text) == markdown


def test_code_keeps_its_backticks() -> None:
    assert as_code("run smoke") == "`run smoke`"
    assert as_code("a`b``c") == "```a`b``c```"
    assert as_code("`a") == "`` `a ``"


def test_commit_names_are_short_and_mark_changes() -> None:
    assert short_commit("0123456789abcdef", dirty=True) == "0123456789+"
    assert short_commit("pkg-1.0.0-0123456789abcdef", dirty=False) == "pkg-1.0.0-0123456789abcdef"


@pytest.mark.parametrize("name", [None, "", "Nowhere/At All", "../etc/passwd"])
def test_unknown_time_zone_is_utc(name: str | None) -> None:
    assert local_time(MOMENT, time_zone(name)) == "2025-11-21 10:00 UTC"


def test_time_is_in_the_zone_of_the_viewer() -> None:
    assert local_time(MOMENT, time_zone("Asia/Tokyo")) == "2025-11-21 19:00 JST"

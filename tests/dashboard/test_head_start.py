"""What a page is about gets a head start in a session's first look, and only then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import head_start


@pytest.mark.parametrize(("call", "seconds"), [("tables", 0.25), ("figure", 1.25)])
def test_only_the_first_look_of_a_session_waits(
    monkeypatch: pytest.MonkeyPatch, call: str, seconds: float
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(head_start, "TABLES_S", 0.25)
    monkeypatch.setattr(head_start, "FIGURE_S", 1.25)
    monkeypatch.setattr(head_start, "time", SimpleNamespace(sleep=waited.append))
    page = f"from dashboard import head_start\nhead_start.let_{call}_be_painted()"
    app = AppTest.from_string(page).run()

    app.run()

    assert waited == [seconds]

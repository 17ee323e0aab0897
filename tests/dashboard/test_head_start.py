"""Tables get a moment before a session's first chart, and only then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from streamlit.testing.v1 import AppTest

from dashboard import head_start


def test_only_the_first_chart_of_a_session_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(head_start, "SECONDS", 0.25)
    monkeypatch.setattr(head_start, "time", SimpleNamespace(sleep=waited.append))
    page = "from dashboard.head_start import let_tables_be_painted\nlet_tables_be_painted()"
    app = AppTest.from_string(page).run()

    app.run()

    assert waited == [0.25]

"""Pages of a count that left 0, of its alert, and of a unit that changed."""

from __future__ import annotations

import pytest
from made_results import counts
from page_content import tables, words

from flexq_bench.ci.history_alerts import judge_histories
from flexq_bench.db.store import add_records


@pytest.fixture
def give(store):
    """give([0, 5]): results of these values at commits 1, 2, …, judged at the end."""
    given = 0

    def run(values, *, unit="spills"):
        nonlocal given
        with store.session() as session:
            add_records(session, counts(values, first=given + 1, unit=unit))
            judge_histories(session)
        given += len(values)

    return run


@pytest.mark.parametrize("page", ["alert", "triage"])
def test_alert_of_count_is_shown_in_levels(open_page, give, page):
    give([0, 0, 0, 5])

    app = open_page(page)

    assert not app.exception
    shown = words(app) + "".join(str(table.to_dict()) for table in tables(app))
    assert "0 -> 5 spills" in shown.replace("\\", "")


def test_history_of_count_is_drawn(open_page, give):
    give([0, 0, 0, 5, 0, -1])

    app = open_page("history", metric="spills")

    assert not app.exception
    assert len(app.get("plotly_chart")) == 1


def test_history_names_the_series_of_another_unit(open_page, give):
    give([0, 0, 0])
    give([7], unit="frames")

    app = open_page("history", metric="spills")

    (warning,) = app.warning
    assert "series 2 is not compared with series 1" in warning.value.replace("\\", "")
    drawn = app.get("plotly_chart")[0].proto.spec.replace(r"\u003cbr\u003e", " ")
    assert "frames, lower is better" in drawn

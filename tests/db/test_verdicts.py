"""Decisions, alerts and the A/A calibration in the database, on both kinds."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from flexq_bench.db import queries
from flexq_bench.db.decisions import (
    FalseAlarmInfo,
    NoiseInfo,
    add_decisions,
    add_false_alarm_rate,
    add_noise,
    join_alert,
    open_alert,
    set_alert_state,
)
from flexq_bench.db.errors import NotFoundError, RecordError
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import Record
from flexq_bench.db.store import add_record
from flexq_bench.db.tables import Decision
from flexq_bench.db.writer import series_identity

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def decide(session, build):
    """decide("uuid", base=1, head=2, m=8, verdict="slower"): stores a decision."""

    def store(uuid="one", *, m=1, **changes):
        return bool(
            add_decisions(session, [build.a_decision(build.a_record(m=m), uuid=uuid, **changes)])
        )

    return store


def opened(session, family="flexq", good=1, bad=2, at=NOW):
    return open_alert(session, family, f"{good:040x}", f"{bad:040x}", at)


@pytest.fixture
def alert(session, decide):
    """An alert of the range from commit 1 to commit 2 with one decision about M = 1."""
    decide()
    alert_id = opened(session)
    join_alert(session, alert_id, ["one"])
    return alert_id


def give(session, alert, state, *, note="because", at=NOW):
    set_alert_state(session, alert, state, person="Ada", note=note, at=at)


def test_decision_comes_back_with_its_exact_evidence(session, decide):
    assert decide() is True

    (row,) = decisions(session)
    assert (row.verdict, row.cause, row.log_ratio, row.parameters) == (
        "slower", "code", 0.05, {"confidence": 0.99},
    )  # fmt: skip
    assert queries.decision_evidence(session, "one") == {"base_us": [1 / 3], "note": "ü"}


def test_decision_stored_twice_changes_nothing(session, decide):
    decide()

    assert decide(verdict="same") is False
    assert next(iter(decisions(session))).verdict == "slower"


def decisions(session):
    return queries.decisions_by_uuid(session, session.scalars(select(Decision.uuid)))


def test_evidence_that_is_not_json_is_refused(decide):
    with pytest.raises(ValueError, match="not JSON compliant"):
        decide(evidence={"x": float("nan")})


def test_decision_and_record_share_series_commits_and_device(session, add, decide):
    add()
    decide()

    (series,) = queries.list_series(session)
    (row,) = decisions(session)
    assert row.series_id == series.id


def test_unknown_evidence_and_alerts_are_not_found(session, alert):
    with pytest.raises(NotFoundError, match="no decision two"):
        queries.decision_evidence(session, "two")
    with pytest.raises(NotFoundError, match="no alert 999"):
        queries.alert_by_id(session, 999)
    with pytest.raises(NotFoundError, match=f"no alert 999: the last one is {alert}"):
        give(session, 999, "fixed")
    with pytest.raises(NotFoundError, match="no commit nothing"):
        open_alert(session, "flexq", "nothing", "nothing", NOW)


def test_alert_opens_once(session, build, alert):
    again = opened(session)
    other = opened(session, "abq")

    assert again == alert != other
    assert [event.state for event in queries.alert_events(session, alert)] == ["new"]


def test_alert_summarizes_its_decisions(session, decide, alert):
    decide("two", m=8, log_ratio=0.2)
    decide("three", m=8, verdict="incorrect", log_ratio=None)
    join_alert(session, alert, ["two", "three"])

    row = queries.alert_by_id(session, alert)
    assert (row.good.topo_order, row.bad.topo_order, row.bad.subject) == (1, 2, "Change 2")
    assert (len(row.series), row.decisions, row.worst, row.gpus) == (2, 3, 0.2, ("NVIDIA H200",))
    order = [d.uuid for d in queries.alert_decisions(session, alert)]
    assert order == ["three", "two", "one"]


def test_decision_stays_in_its_first_alert(session, build, decide, alert):
    other = opened(session, "abq")
    join_alert(session, other, ["one"])

    assert queries.alert_decisions(session, other) == []


def test_events_of_an_alert_are_kept(session, alert):
    give(session, alert, "acknowledged", note="on it")
    give(session, alert, "fixed", note="", at=NOW + timedelta(hours=1))

    row = queries.alert_by_id(session, alert)
    assert (row.state, row.closed_at, row.note) == ("fixed", NOW + timedelta(hours=1), "on it")
    events = queries.alert_events(session, alert)
    assert [(e.state, e.person, e.note) for e in events] == [
        ("new", "", ""), ("acknowledged", "Ada", "on it"), ("fixed", "Ada", ""),
    ]  # fmt: skip


def test_closed_alert_can_be_opened_again(session, alert):
    give(session, alert, "false-alarm")
    give(session, alert, "acknowledged")

    assert queries.alert_by_id(session, alert).closed_at is None


@pytest.mark.parametrize("state", ["new", "done"])
def test_invalid_state_of_an_alert_is_refused(session, alert, state):
    with pytest.raises(RecordError, match="acknowledged, explained, fixed, false-alarm"):
        give(session, alert, state)


def test_alerts_are_filtered_and_newest_first(session, build, alert):
    later = opened(session, "abq", at=NOW + timedelta(days=1))
    give(session, alert, "explained")

    assert [row.id for row in queries.alerts(session)] == [later, alert]
    assert [row.id for row in queries.alerts(session, states=("new",))] == [later]
    assert [row.id for row in queries.alerts(session, family="flexq")] == [alert]


def a_history(session, build, count, *, m=1, **changes):
    for order in range(1, count + 1):
        add_record(
            session, build.a_record(f"r{order}", m=m, commit=build.a_commit(order), **changes)
        )
    return queries.list_series(session, Filters(m=(m,)))[0].id


def test_explained_alert_opens_an_epoch_in_its_series_only(session, build, alert):
    series, other = a_history(session, build, 4), a_history(session, build, 4, m=8)
    give(session, alert, "explained")

    assert [p.epoch for p in queries.series_history(session, series)] == [1, 2, 2, 2]
    assert [p.epoch for p in queries.series_history(session, other)] == [1, 1, 1, 1]


def test_other_state_removes_the_epoch(session, build, alert):
    series = a_history(session, build, 4)
    give(session, alert, "explained")
    give(session, alert, "false-alarm")

    assert {p.epoch for p in queries.series_history(session, series)} == {1}


def test_series_that_joins_an_explained_alert_gets_an_epoch(session, build, decide, alert):
    series = a_history(session, build, 3, m=8)
    give(session, alert, "explained")
    decide("two", m=8)
    join_alert(session, alert, ["two"])

    assert [p.epoch for p in queries.series_history(session, series)] == [1, 2, 2]


def test_verdicts_do_not_change_records(session, build, alert):
    a_history(session, build, 3)
    before = list(queries.stored_records(session, Record))
    give(session, alert, "explained")

    assert list(queries.stored_records(session, Record)) == before


def base_order(session, series):
    return int(queries.trusted_bases(session, [series], lag=2)[series], 16)


def test_trusted_base_trails_the_newest_result(session, build):
    assert queries.trusted_bases(session, [1]) == {}
    assert base_order(session, a_history(session, build, 1)) == 1
    assert base_order(session, a_history(session, build, 8)) == 6


def test_trusted_base_is_outside_the_range_of_open_alerts(session, build, decide):
    series = a_history(session, build, 8)
    assert base_order(session, series) == 6

    decide("late", base=6, head=8)
    late = opened(session, good=6, bad=8)
    join_alert(session, late, ["late"])
    assert base_order(session, series) == 8

    give(session, late, "false-alarm")
    assert base_order(session, series) == 6


def test_trusted_base_is_in_the_newest_epoch(session, build, decide):
    series = a_history(session, build, 8)
    decide("late", base=6, head=7)
    late = opened(session, good=6, bad=7)
    join_alert(session, late, ["late"])
    give(session, late, "explained")

    assert base_order(session, series) == 7


def a_noise(series_id, **changes):
    fields = {
        "series_id": series_id,
        "computed_at": NOW,
        "decisions": ("one",),
        "placements": 6,
        "blocks": 12,
        "block_sigma": 0.001,
        "placement_sigma": 0.002,
        "comparison_sigma": None,
        "estimate_sigma": 0.003,
        "noise_floor": None,
        "smallest_step": None,
    }
    return NoiseInfo(**fields | changes)


def test_aa_calibration_returns_the_newest_noise_of_a_series(session, build):
    series = a_history(session, build, 1)
    later = NOW + timedelta(days=1)

    assert add_noise(session, a_noise(series)) is True
    assert add_noise(session, a_noise(series, computed_at=later)) is False
    newer = a_noise(series, decisions=("one", "two"), computed_at=later, noise_floor=0.02)
    assert add_noise(session, newer) is True

    (page,) = queries.aa_calibration(session)
    assert (page.comparisons, page.noise_floor, page.kernel) == (2, 0.02, "flexq-w6a6")


def test_noise_floor_is_found_by_series_identity(session, build):
    add_noise(session, a_noise(a_history(session, build, 1), noise_floor=0.02))
    known, unknown = (series_identity(build.a_record(m=m)) for m in (1, 8))

    assert queries.noise_floors(session, [unknown, known, known]) == [0.0, 0.02, 0.02]


def test_false_alarm_rates_are_stored_over_time(session):
    rate = FalseAlarmInfo(NOW, NOW, ("one", "two"), 1, 0.5, 0.01, 0.99, 0.95)

    assert add_false_alarm_rate(session, rate) is True
    assert add_false_alarm_rate(session, rate) is False
    later = dataclasses.replace(rate, decisions=("a",), until=NOW + timedelta(days=1))
    assert add_false_alarm_rate(session, later) is True
    assert [row.canaries for row in queries.false_alarm_rates(session)] == [1, 2]


def test_comparison_of_a_commit_with_itself_is_a_canary(session, decide):
    decide("same", base=2, head=2)
    decide("other", base=1, head=2)

    second = timedelta(seconds=1)
    found = queries.canaries(session, since=NOW - second, until=NOW + second)
    assert [row.uuid for row in found] == ["same"]
    assert queries.canaries(session, since=NOW + second, until=NOW + 2 * second) == []

"""Open alerts judged again: they stand, move, or end with the reason."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from flexq_bench.ci.history_alerts import judge_histories
from flexq_bench.db import queries
from flexq_bench.db.decisions import set_alert_state
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.releases import store_releases
from flexq_bench.db.store import add_records
from flexq_bench.exchange.external.records import Origin, external_records
from flexq_bench.exchange.external.result import ExternalResult, Reading
from flexq_bench.stats import follower

START = datetime(2026, 1, 1, tzinfo=UTC)


def noisy(level, count, seed=0):
    noise = random.Random(f"{level} {seed}")
    return [level * (1 + 0.005 * noise.gauss(0, 1)) for _ in range(count)]


@pytest.fixture
def feed(session):
    """feed(values): a result at each commit, judged at the last one, or at each; returns what
    changed in alerts.
    """
    count = 0

    def run(values, *, name="gemm", tool="t 1", each=False):
        nonlocal count
        texts = []
        for place, value in enumerate(values, start=1):
            count += 1
            at = (START + timedelta(hours=count)).isoformat()
            commit = CommitInfo(f"{count:040x}", None, None, dirty=False, project="p")
            origin = Origin("p", commit, "G", time=at, occasion=str(count))
            result = ExternalResult(name, "", value, environment={"tool": tool})
            add_records(session, external_records(Reading((result,)), origin)[0])
            if each or place == len(values):
                texts += [change.text for change in judge_histories(session).changed]
        return texts

    return run


def alert_of(session):
    (alert,) = queries.alerts(session)
    return alert


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_three_slow_commits_close_with_the_reason(session, feed, seed):
    texts = feed(
        [*noisy(100, 30, seed), *noisy(120, 3, seed), *noisy(100, 17, seed + 9)], each=True
    )

    alert = alert_of(session)
    assert alert.state == "fixed"
    assert len(texts) == 1
    assert "every series is back at the earlier level of" in alert.note
    assert queries.alert_events(session, alert.id)[-1].note == alert.note


def test_visit_to_a_level_closes_on_return(session, feed):
    feed([*noisy(100, 30), *noisy(115, 20)])
    assert alert_of(session).state == "new"

    (text_of_end,) = feed(noisy(100, 10, seed=1))

    assert "is fixed: every series is back at the earlier level of" in text_of_end


def test_second_visit_says_that_its_level_is_earlier(session, feed):
    feed([*noisy(100, 30), *noisy(115, 30), *noisy(100, 30, seed=1), *noisy(115, 6, seed=1)])

    (decision,) = queries.alert_decisions(session, alert_of(session).id)
    assert "a return to an earlier level (11" in decision.reason


def test_lasting_change_keeps_its_alert(session, feed):
    feed([*noisy(100, 30), *noisy(110, 6)])
    assert feed(noisy(110, 30, seed=1)) == []
    assert alert_of(session).state == "new"


def test_change_that_an_earlier_version_reported_stays(session, feed, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(follower, "SETTLED", 18)
        feed([*noisy(100, 20), *noisy(110, 6)])

    assert feed(noisy(110, 1, seed=1)) == []
    assert alert_of(session).state == "new"


def test_alert_of_benchmark_no_longer_measured_ends(session, feed):
    feed([*noisy(100, 30), *noisy(110, 6)])

    texts = feed(noisy(50, 31), name="other")

    assert texts == ["alert 1 is ended: none of its series was measured at the last 30 commits"]


def test_alert_of_an_old_environment_ends(session, feed):
    feed([*noisy(100, 30), *noisy(110, 6)])
    assert feed(noisy(90, 19), tool="t 2") == []

    (ended,) = feed(noisy(90, 1), tool="t 2")

    assert ended.startswith("alert 1 is ended: 20 results have another environment")


def leave_out(session, order):
    """Take a commit's results out of the history."""
    session.execute(
        text(
            "UPDATE measurement SET accepted = false WHERE commit_id IN "
            '(SELECT id FROM "commit" WHERE sha = :sha)'
        ),
        {"sha": f"{order:040x}"},
    )


def test_alert_moves_if_its_commit_left_the_history(session, feed):
    feed([*noisy(100, 30), *noisy(110, 8)])
    leave_out(session, 31)

    (moved,) = feed(noisy(110, 1, seed=1))

    alert = alert_of(session)
    assert (alert.state, alert.good.sha, alert.bad.sha) == ("new", f"{30:040x}", f"{32:040x}")
    assert "has moved to" in moved
    assert f"{31:040x}"[:10] in moved
    assert "no longer on the line of history" in queries.alert_events(session, alert.id)[-1].note


def test_alert_ends_if_its_change_left_the_history(session, feed):
    feed([*noisy(100, 30), *noisy(110, 6)])
    for order in range(31, 37):
        leave_out(session, order)

    (ended,) = feed(noisy(100, 1, seed=1))

    assert "is ended: 0000000000 is no longer on the line of history" in ended


def test_ended_alert_opens_again_with_its_change(session, feed):
    feed([*noisy(100, 30), *noisy(110, 6)])
    set_alert_state(session, 1, "ended", person="", note="gone", at=START)
    session.execute(
        text("UPDATE change_point SET retracted_at = :at, retraction_reason = 'gone'"),
        {"at": "2026-02-01 00:00:00"},
    )

    feed(noisy(110, 1, seed=1))

    assert alert_of(session).state == "new"
    assert "reopened" in alert_of(session).note


def test_reopened_alert_does_not_end_for_same_reason(session, feed):
    feed([*noisy(100, 30), *noisy(110, 6)])
    feed(noisy(50, 31), name="other")
    later = datetime.now(UTC) + timedelta(minutes=1)
    set_alert_state(session, 1, "acknowledged", person="Ada", note="", at=later)

    assert feed(noisy(50, 1, seed=1), name="other") == []
    assert alert_of(session).state == "acknowledged"


@pytest.mark.parametrize(("days", "state"), [(100, "explained"), (1, "acknowledged")])
def test_acknowledged_change_that_was_shipped_is_explained(session, feed, days, state):
    feed([*noisy(100, 30), *noisy(110, 6)])
    set_alert_state(
        session, 1, "acknowledged", person="Ada", note="", at=START + timedelta(days=50)
    )
    session.execute(
        text('UPDATE "commit" SET committed_at = :at'),
        {"at": (START + timedelta(days=days)).strftime("%Y-%m-%d %H:%M:%S")},
    )
    store_releases(session, {"v2": f"{35:040x}"}, project="p")

    judge_histories(session)

    alert = alert_of(session)
    assert alert.state == state
    if state == "explained":
        assert alert.note == "acknowledged by Ada, and shipped in v2"

"""The Triage page."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from made_results import H200, a_record, a_run
from page_content import table, words

from flexq_bench.dashboard.shared.alert_requests import MAX_LISTED
from flexq_bench.db import queries
from flexq_bench.db.queries import HistoryPoint
from flexq_bench.db.requests import Limits, RequestInfo, add_request
from flexq_bench.results.alert_level import RECOVERED, STILL_SLOW, alert_level
from flexq_bench.results.stored_noise import StoredNoise


@pytest.fixture
def alerted(store, compared, commits):
    """Two alerts, of which the first one's kernel is as fast as before again by commit 9."""

    def fill(new):
        slow = compared("flexq-w6a6", 1.05, base=3, head=6, shape=(8, 4096, 4096))
        other = compared("cublas-fp16", 1.05, base=3, head=6)
        new.judge(slow, other, commits=commits)
        identity = {"m": 8, "n": 4096, "k": 4096, "backend": "cpu"}
        shas = sorted(commits, key=lambda sha: commits[sha].topo_order)
        for order, sha in enumerate(shas, start=1):
            created_at = f"2025-11-{order:02d}T10:00:00+00:00"
            level = 8.4 if 6 <= order < 9 else 8.0
            run = a_run(f"night {order}", trigger="nightly", created_at=created_at)
            commit = replace(commits[sha], topo_order=order)
            ends = {"ci_low_us": 0.999 * level, "ci_high_us": 1.001 * level}
            fields = identity | ends | {"commit": commit, "created_at": created_at}
            new.add(a_record(run, median_us=level, **fields))

    return store.once(fill)


def states(store):
    with store.session() as session:
        return {row.id: row.state for row in queries.alerts(session)}


def test_every_open_alert_is_a_row_that_leads_to_it(alerted, open_triage):
    rows = table(open_triage(), of="worst")

    assert set(rows["kernel"]) == {"flexq-w6a6", "cublas-fp16"}
    assert rows["alert"].str.startswith("alert?alert=").all()
    assert set(rows["GPU"]) == {H200}


def test_filters_are_in_the_link(alerted, open_triage):
    assert table(open_triage(kernel="flexq-w6a6"), of="worst")["kernel"].tolist() == ["flexq-w6a6"]
    assert "No alert passes" in words(open_triage(state="fixed"))


def test_several_alerts_are_assigned_and_set_at_once(alerted, open_triage):
    app = open_triage()
    app.multiselect[0].set_value(sorted(states(alerted)))
    next(box for box in app.selectbox if box.label == "State").set_value("acknowledged")
    to, person = app.text_input
    to.set_value("Bo")
    person.set_value("Ada")
    next(b for b in app.button if b.label == "Save").click().run()

    assert not app.exception
    assert set(states(alerted).values()) == {"acknowledged"}
    rows = table(open_triage(assigned="Bo"), of="worst")
    assert rows["assigned"].tolist() == ["Bo", "Bo"]


def test_state_that_needs_a_reason_is_refused_without(alerted, open_triage):
    app = open_triage()
    app.multiselect[0].set_value([1])
    next(box for box in app.selectbox if box.label == "State").set_value("explained")
    next(b for b in app.button if b.label == "Save").click().run()

    assert "says why" in words(app)
    assert set(states(alerted).values()) == {"new"}


def test_click_queues_the_comparison_of_an_alert(alerted, open_triage):
    app = open_triage(kernel="flexq-w6a6")
    next(b for b in app.button if b.label.startswith("Measure alert")).click().run()

    assert "Queued as request" in words(app)
    with alerted.session() as session:
        (request,) = queries.requests(session)
    assert request.content["kernels"] == ["flexq-w6a6"]
    assert request.content["m"] == [8]
    assert (request.gpu, request.state) == (H200, "queued")
    assert table(open_triage(), of="for alert")["state"].tolist() == ["queued"]


def test_requests_of_alerts_stay_listed(alerted, open_triage):
    limits = Limits(99, 99, 99, 99, 99)
    with alerted.session() as session:
        for number, who in enumerate(["triage 1", *["Ada"] * MAX_LISTED]):
            at = datetime(2025, 12, 1, number, tzinfo=UTC)
            info = RequestInfo(f"{number}" * 36, "sweep", {}, who, H200, 1, None, at)
            add_request(session, info, limits=limits)

    assert table(open_triage(), of="for alert")["for alert"].tolist() == ["1"]


def test_click_queues_a_bisection_of_the_worst_verdict(alerted, open_triage):
    app = open_triage(kernel="flexq-w6a6")
    next(b for b in app.button if b.label.startswith("Bisect alert")).click().run()

    assert "Queued as request" in words(app)
    with alerted.session() as session:
        (request,) = queries.requests(session)
        alert = next(row for row in queries.alerts(session) if "flexq-w6a6" in row.kernels)
    assert (request.kind, request.gpu, request.state) == ("bisect", H200, "queued")
    assert request.content == {
        "case": "flexq-w6a6 gemm cold m8n4096k4096",
        "good": alert.good.sha,
        "bad": alert.bad.sha,
    }
    app = open_triage()
    assert table(app, of="for alert")["what"].tolist() == ["bisection"]
    next(b for b in app.button if b.label.startswith("Bisect alert")).click().run()

    assert f"Request {request.uuid[:8]} already covers this bisection and is queued" in words(app)
    with alerted.session() as session:
        assert len(queries.requests(session)) == 1


def test_a_read_only_app_has_no_forms(alerted, open_triage, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_READ_ONLY", "1")

    app = open_triage()

    assert not app.button
    assert "read-only" in words(app)


def test_a_throughput_that_is_low_still_is_no_recovery():
    alert = SimpleNamespace(
        good=SimpleNamespace(topo_order=3), bad=SimpleNamespace(topo_order=6), series=(1,)
    )
    at = datetime(2025, 11, 1, tzinfo=UTC)
    points = [
        HistoryPoint(
            "a" * 40, order, 1, f"run {order}", f"{order}", at + timedelta(days=order),
            80.0 if order >= 6 else 100.0, None, None, None, None,
        )
        for order in range(1, 12)
    ]  # fmt: skip
    noise = StoredNoise({1: points})

    assert alert_level(alert, noise, higher_is_better={1}).words == STILL_SLOW
    assert alert_level(alert, noise).words == RECOVERED

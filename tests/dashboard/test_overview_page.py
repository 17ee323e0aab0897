"""The Overview page."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

from made_results import H200, a_record, a_run, records_of
from page_content import markdown, table
from streamlit.testing.v1 import AppTest

from flexq_bench.db.decisions import FalseAlarmInfo, add_false_alarm_rate, set_alert_state

NOW = datetime(2026, 1, 3, tzinfo=UTC)


def alert_links(app: AppTest) -> list[str]:
    return [link.proto.label.replace("\\", "") for link in app.get("page_link")]


def test_it_is_where_the_app_opens(filled, open_app):
    assert open_app().title[0].value == "Scoreboard"


def test_before_the_first_verdict_it_says_how_to_get_one(filled, open_overview):
    text = markdown(open_overview())

    assert "gate perf --base 'HEAD~1' --head HEAD" in text
    assert "gate perf --base HEAD --head HEAD" in text
    assert "no commit was compared with another one yet" in text


def test_the_latest_night_is_counted_by_verdict(filled, open_overview, compared, commits):
    filled.judge(compared("cublas-fp16", 1.05, base=1, head=2), night=1, commits=commits)
    filled.judge(
        compared("flexq-w6a6", 1.05, base=2, head=3),
        compared("flexq-w6a8", 1.05, base=2, head=3),
        compared("cublas-fp16", 0.9, base=2, head=3),
        compared("abq-w6a6", correct=False, base=2, head=3),
        compared("cublaslt-w8a8", base=3, head=3),
        night=2,
        commits=commits,
    )

    (row,) = table(open_overview(), of="slower").to_dict("records")
    assert (row["GPU"], row["slower"], row["faster"], row["incorrect"], row["ambiguous"]) == (
        H200, 2, 1, 1, 0,
    )  # fmt: skip
    assert row["same"] == 0  # the commit beside itself is no verdict on it


def test_a_pull_request_is_not_the_latest_night(filled, open_overview, compared, commits):
    filled.judge(compared("flexq-w6a6", 1.05), night=1, commits=commits)
    filled.judge(
        compared("flexq-w6a6", 0.9, base=2, head=3), night=2, commits=commits, alerting=False
    )

    (row,) = table(open_overview(), of="slower").to_dict("records")
    assert (row["slower"], row["faster"]) == (1, 0)


def test_open_alerts_are_linked_newest_first(filled, open_overview, compared, commits):
    filled.judge(compared("flexq-w6a6", 1.05), compared("flexq-w6a8", 1.06), commits=commits)
    filled.judge(compared("cublas-fp16", 1.1, base=4, head=5), night=2, commits=commits)

    app = open_overview()

    assert [label.split(" +")[0] for label in alert_links(app)] == [
        "Alert 2: cublas-fp16",
        "Alert 1: flexq-w6a8 and 1 more of flexq",
    ]
    assert "2 series" in alert_links(app)[1]
    assert [link.proto.query_string for link in app.get("page_link")] == ["alert=2", "alert=1"]


def test_a_closed_alert_is_not_listed(filled, open_overview, compared, commits):
    (alert,) = filled.judge(compared("flexq-w6a6", 1.05), commits=commits).opened
    with filled.session() as session:
        set_alert_state(session, alert, "fixed", person="Ada", note="", at=NOW)

    app = open_overview()

    assert alert_links(app) == []
    assert "No alert is open." in markdown(app)


def test_the_false_alarm_rate_has_its_interval(filled, open_overview):
    rate = FalseAlarmInfo(NOW, NOW, ("a", "b", "c", "d"), 1, 0.25, 0.006, 0.806, 0.95)
    with filled.session() as session:
        add_false_alarm_rate(session, rate)

    text = markdown(open_overview())

    assert "**25.0%**" in text
    assert "95% interval 0.6% to 80.6%" in text
    assert "1 of 4" in text


def test_cases_that_did_not_run_are_listed_with_reasons(store, open_overview):
    run = a_run(status="interrupted")
    ran, failed, wrong = records_of(run, m=[1])[:3]
    failed = dataclasses.replace(failed, status="failed", detail="out of memory", accepted=False)
    wrong = dataclasses.replace(wrong, status="incorrect", detail="y[0,0] = 1", accepted=False)
    plan = (ran.case, failed.case, wrong.case, "never-came gemm cold m1n1k1")
    run = dataclasses.replace(run, plan=plan)
    store.add(*(dataclasses.replace(record, run=run) for record in (ran, failed, wrong)))

    app = open_overview()

    (row,) = table(app, of="planned").to_dict("records")
    assert (row["planned"], row["received"], row["missing"]) == (4, 3, 1)
    assert (row["ok"], row["failed"], row["incorrect"]) == (1, 1, 1)
    reasons = {r["status"]: r["why"] for r in table(app, of="why").to_dict("records")}
    assert reasons == {
        "failed": "out of memory",
        "incorrect": "y[0,0] = 1",
        "no result": "the run is interrupted",
    }
    assert f"run --resume {run.uuid[:8]}" in markdown(app)


def test_each_gpu_has_its_own_newest_run(store, open_overview):
    later = a_run("later", created_at="2025-11-22T10:00:00+00:00")
    other = a_run("other", created_at="2025-11-20T10:00:00+00:00")
    store.add(a_record(), a_record(later), a_record(other, gpu="NVIDIA A100"))

    rows = table(open_overview(), of="planned").set_index("GPU")["run"].to_dict()

    assert rows == {H200: later.uuid[:8], "NVIDIA A100": other.uuid[:8]}


def test_a_run_that_has_no_result_yet_is_listed(filled, open_overview):
    waiting = a_run(
        "waiting", status="running", created_at="2025-11-22T10:00:00+00:00", plan=("a",)
    )
    filled.declare(waiting)

    rows = table(open_overview(), of="planned").to_dict("records")

    assert [(row["GPU"], row["run"]) for row in rows] == [
        (H200, a_run().uuid[:8]),
        ("(no result yet)", waiting.uuid[:8]),
    ]


def test_a_suite_in_the_link_narrows_the_runs(store, open_overview):
    smoke = a_run("smoke", suite="smoke", created_at="2025-11-22T10:00:00+00:00")
    store.add(a_record(), a_record(smoke))

    def shown(**link):
        return table(open_overview(**link), of="planned")["suite"].tolist()

    assert (shown(), shown(suite="paper-fig10")) == (["smoke"], ["paper-fig10"])


def test_text_of_people_is_no_markup(filled, open_overview, compared, commits):
    named = {
        key: dataclasses.replace(info, subject="<img src=x onerror=alert(1)>", author="**Eve**")
        for key, info in commits.items()
    }
    (alert,) = filled.judge(compared("flexq-w6a6", 1.05), commits=named).opened
    with filled.session() as session:
        set_alert_state(
            session, alert, "acknowledged", person="x", note="[click](http://evil.example)", at=NOW
        )

    app = open_overview()

    # A backslash before each sign: Markdown shows it and gives it no meaning.
    assert r"\<img src\=x onerror\=alert\(1\)\>" in markdown(app)
    assert r"\*\*Eve\*\*" in markdown(app)
    assert r"\[click\]\(http\://evil\.example\)" in markdown(app)

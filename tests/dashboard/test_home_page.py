"""The Home page."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any

from made_models import a_gate
from made_results import H200, a_record, a_run, records_of
from page_content import markdown, table, tables
from streamlit.testing.v1 import AppTest

from flexq_bench.db.decisions import FalseAlarmInfo, add_false_alarm_rate, set_alert_state

NOW = datetime(2026, 1, 3, tzinfo=UTC)


def alert_links(app: AppTest) -> list[str]:
    return [link.proto.label.replace("\\", "") for link in app.get("page_link")]


def test_it_is_where_the_app_opens(filled, open_app):
    assert open_app().title[0].value == "Home"


def test_before_the_first_verdict_it_says_how_to_get_one(filled, open_home):
    text = markdown(open_home())

    assert "gate perf --base 'HEAD~1' --head HEAD" in text
    assert "gate perf --base HEAD --head HEAD" in text
    assert "no night or gate compared commits lately" in text


def test_the_latest_night_is_counted_by_verdict(filled, open_home, compared, commits):
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

    (row,) = table(open_home(), of="slower").to_dict("records")
    assert (row["GPU"], row["slower"], row["faster"], row["incorrect"], row["ambiguous"]) == (
        H200, 2, 1, 1, 0,
    )  # fmt: skip
    assert row["same"] == 0  # the commit beside itself is no verdict on it
    assert row["of"] == "watched branch"


def test_gate_is_a_row_beside_the_latest_night(filled, open_home, compared, commits):
    filled.judge(compared("flexq-w6a6", 1.05), night=1, commits=commits)
    gate = compared("flexq-w6a6", 0.9, base=2, head=3)
    filled.judge(gate, night=2, commits=commits, alerting=False)

    rows = table(open_home(), of="slower").to_dict("records")
    assert [(row["of"], row["slower"], row["faster"]) for row in rows] == [
        ("other commits", 0, 1),
        ("watched branch", 1, 0),
    ]


def tables_of(app: AppTest, column: str) -> list[Any]:
    return [frame for frame in tables(app) if column in frame.columns]


def test_failed_gate_alone_needs_a_decision(store, open_home, compared, commits):
    store.judge(compared("flexq-w6a6", 1.05), commits=commits, alerting=False)

    app = open_home()

    assert "Gates of kernels that failed" in markdown(app)
    assert [rows["slower"].tolist() for rows in tables_of(app, "slower")] == [[1], [1]]
    assert "No alert is open" not in markdown(app)
    assert "no run of a suite measured them" in markdown(app)


def test_gate_that_passed_when_repeated_needs_none(store, open_home, compared, commits):
    store.judge(compared("flexq-w6a6", 1.05), commits=commits, alerting=False)
    store.judge(compared("flexq-w6a6", 1.0), night=2, commits=commits, alerting=False)

    assert "No alert is open, and no gate failed" in markdown(open_home())


def test_alert_of_a_gate_is_shown_without_runs(store, open_home, compared, commits):
    store.judge(compared("flexq-w6a6", 1.05), commits=commits)

    assert len(alert_links(open_home())) == 1


def test_refused_accuracy_gate_needs_a_decision(store, open_home):
    early = {"created_at": "2025-11-20T10:00:05+00:00"}
    store.keep(a_gate("w4a4", "regression"), a_gate("w6a6", "regression", **early), a_gate("w6a6"))

    app = open_home()

    assert table(app, of="decided by")["scheme"].tolist() == ["w4a4"]
    assert "Every accuracy gate passed" not in markdown(app)


def test_interrupted_cpu_night_is_broken_until_the_next_complete(store, open_home):
    night = a_run("night", suite="nightly", trigger="nightly", status="interrupted", plan=("a",))
    store.declare(night)
    first = open_home()
    good = {"created_at": "2025-11-23T10:00:00+00:00"}
    later = a_run("later", suite="nightly", trigger="nightly", **good)
    store.add(a_record(later, backend="cpu", gpu="A CPU", **good))

    assert table(first, of="problem")["problem"].tolist() == [
        "the run was interrupted, 1 of 1 cases have no result"
    ]
    assert "No scheduled run is broken." in markdown(open_home())
    assert "No run was scheduled" not in markdown(open_home())


def test_open_alerts_are_linked_newest_first(filled, open_home, compared, commits):
    filled.judge(compared("flexq-w6a6", 1.05), compared("flexq-w6a8", 1.06), commits=commits)
    filled.judge(compared("cublas-fp16", 1.1, base=4, head=5), night=2, commits=commits)

    app = open_home()

    assert [label.split(" +")[0] for label in alert_links(app)] == [
        "Alert 2: cublas-fp16",
        "Alert 1: flexq-w6a8 and 1 more of flexq",
    ]
    assert "2 series" in alert_links(app)[1]
    assert [link.proto.query_string for link in app.get("page_link")] == ["alert=2", "alert=1"]


def test_a_closed_alert_is_not_listed(filled, open_home, compared, commits):
    (alert,) = filled.judge(compared("flexq-w6a6", 1.05), commits=commits).opened
    with filled.session() as session:
        set_alert_state(session, alert, "fixed", person="Ada", note="", at=NOW)

    app = open_home()

    assert alert_links(app) == []
    assert "No alert is open, and no gate failed" in markdown(app)


def test_the_false_alarm_rate_has_its_interval(filled, open_home):
    rate = FalseAlarmInfo(NOW, NOW, ("a", "b", "c", "d"), 1, 0.25, 0.006, 0.806, 0.95)
    with filled.session() as session:
        add_false_alarm_rate(session, rate)

    text = markdown(open_home())

    assert "**25.0%**" in text
    assert "95% interval 0.6% to 80.6%" in text
    assert "1 of 4" in text


def test_cases_that_did_not_run_are_listed_with_reasons(store, open_home):
    run = a_run(status="interrupted")
    ran, failed, wrong = records_of(run, m=[1])[:3]
    failed = dataclasses.replace(failed, status="failed", detail="out of memory", accepted=False)
    wrong = dataclasses.replace(wrong, status="incorrect", detail="y[0,0] = 1", accepted=False)
    plan = (ran.case, failed.case, wrong.case, "never-came gemm cold m1n1k1")
    run = dataclasses.replace(run, plan=plan)
    store.add(*(dataclasses.replace(record, run=run) for record in (ran, failed, wrong)))

    app = open_home()

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


def test_each_gpu_has_its_own_newest_run(store, open_home):
    later = a_run("later", created_at="2025-11-22T10:00:00+00:00")
    other = a_run("other", created_at="2025-11-20T10:00:00+00:00")
    store.add(a_record(), a_record(later), a_record(other, gpu="NVIDIA A100"))

    rows = table(open_home(), of="planned").set_index("GPU")["run"].to_dict()

    assert rows == {
        gpu: f"results?run={run.uuid[:8]}" for gpu, run in ((H200, later), ("NVIDIA A100", other))
    }


def test_a_run_that_has_no_result_yet_is_listed(filled, open_home):
    waiting = a_run(
        "waiting", status="running", created_at="2025-11-22T10:00:00+00:00", plan=("a",)
    )
    filled.declare(waiting)

    rows = table(open_home(), of="planned").to_dict("records")

    assert [(row["GPU"], row["run"]) for row in rows] == [
        (H200, f"results?run={a_run().uuid[:8]}"),
        ("(no result yet)", f"results?run={waiting.uuid[:8]}"),
    ]


def test_a_suite_in_the_link_narrows_the_runs(store, open_home):
    smoke = a_run("smoke", suite="smoke", created_at="2025-11-22T10:00:00+00:00")
    store.add(a_record(), a_record(smoke))

    def shown(**link):
        return table(open_home(**link), of="planned")["suite"].tolist()

    assert (shown(), shown(suite="paper-fig10")) == (["smoke"], ["paper-fig10"])


def test_text_of_people_is_no_markup(filled, open_home, compared, commits):
    named = {
        key: dataclasses.replace(info, subject="<img src=x onerror=alert(1)>", author="**Eve**")
        for key, info in commits.items()
    }
    (alert,) = filled.judge(compared("flexq-w6a6", 1.05), commits=named).opened
    with filled.session() as session:
        set_alert_state(
            session, alert, "acknowledged", person="x", note="[click](http://evil.example)", at=NOW
        )

    app = open_home()

    # A backslash before each sign: Markdown shows it and gives it no meaning.
    assert r"\<img src\=x onerror\=alert\(1\)\>" in markdown(app)
    assert r"\*\*Eve\*\*" in markdown(app)
    assert r"\[click\]\(http\://evil\.example\)" in markdown(app)

"""The Fleet page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from made_results import COMMIT, H200, a_record, a_run, numbers
from page_content import chart, table_rows, words

from flexq_bench.db import queries
from flexq_bench.db.fleet import (
    Beat,
    JobInfo,
    OffsetInfo,
    WorkerInfo,
    add_jobs,
    add_offsets,
    beat,
    claim_jobs,
    end_worker,
    finish_jobs,
    register_worker,
)
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.requests import Limits, RequestInfo, add_request
from flexq_bench.db.store import begin_run


def now() -> datetime:
    """Return the current time: a heartbeat at import would be too old when a test runs."""
    return datetime.now(UTC)


DEVICES = [DeviceInfo(f"GPU-{i}", H200, "cuda", power_limit_w=700.0, ecc=True) for i in (1, 2)]
CASES = [f"flexq-w6a6 gemm cold m{m}n4096k4096" for m in (1, 2, 4)]


@pytest.fixture
def fleet(store: Any) -> Any:
    """Two workers: one measures, one was last heard of an hour ago; a run of three jobs."""
    run = a_run(status="running", plan=tuple(CASES))
    with store.session() as session:
        begin_run(session, run, COMMIT)
        add_jobs(session, run.uuid, [JobInfo(case, expected_s=60.0) for case in CASES])
        for name, device in zip(("busy", "silent"), DEVICES, strict=True):
            info = WorkerInfo(name, f"host-{name}", 1, device, {"driver": "580.1"})
            register_worker(session, info, at=now() - timedelta(hours=1))
        jobs = queries.jobs_of(session, run.uuid)
        until = now() + timedelta(minutes=5)
        claim_jobs(session, {jobs[0].id: "busy"}, until=until, at=now())
        beat(session, [Beat("busy", CASES[0], 61.0, 7, 5400.0)], until=until, at=now())
        bad = a_record(run, m=2, status="failed", detail="it ended 3 workers", median_us=None)
        finish_jobs(session, {jobs[1].id: bad}, state="quarantined")
    return store


def test_workers_show_case_temperature_and_last_contact(fleet, open_fleet):
    busy, silent = table_rows(open_fleet(), of="measures")

    assert (busy["state"], busy["measures"], busy["°C"]) == ("measuring", CASES[0], 61.0)
    assert (busy["jobs done"], busy["measuring, h"]) == (7, 1.5)
    assert busy["lease until"]
    assert (silent["state"], silent["ago"]) == ("silent", "60 min")


def test_silent_worker_is_marked(fleet, open_fleet):
    assert "1 of 2 workers sent no heartbeat" in words(open_fleet())


def test_lost_worker_shows_its_reason(fleet, open_fleet):
    with fleet.session() as session:
        for name in ("busy", "silent"):
            end_worker(session, name, detail="killed: out of memory", at=now())

    app = open_fleet(all="on")

    assert "No worker is alive" in words(app)
    assert {row["why"] for row in table_rows(app, of="measures")} == {"killed: out of memory"}


def test_run_shows_its_progress_and_remaining_time(fleet, open_fleet):
    (run,) = table_rows(open_fleet(), of="ended, %")

    assert run["ended, %"] == pytest.approx(100 / 3)
    assert (run["queued"], run["leased"], run["quarantined"]) == (1, 1, 1)
    assert run["left, GPU min"] == pytest.approx(2.0)


def test_a_case_that_was_taken_out_is_listed(fleet, open_fleet):
    (row,) = table_rows(open_fleet(), of="worker deaths")

    assert row["case"] == CASES[1]
    assert row["run"] == a_run().uuid[:8]


def test_requests_are_listed_with_who_asked(fleet, open_fleet):
    info = RequestInfo("r-1", "sweep", {}, "=Ada", "", 12, None, now())
    with fleet.session() as session:
        add_request(session, info, limits=Limits(5, 100, 100, 5, 100))

    (row,) = table_rows(open_fleet(), of="by")

    assert (row["by"], row["state"], row["cases"], row["GPU"]) == (
        "\u200b=Ada",
        "queued",
        12,
        "any",
    )


def test_gpus_of_one_kind_are_compared_with_intervals(fleet, open_fleet):
    with fleet.session() as session:
        offsets = [OffsetInfo(d, 40, v, v - 0.002, v + 0.004) for d, v in
                   zip(DEVICES, (-0.01, 0.01), strict=True)]  # fmt: skip
        add_offsets(session, a_run().uuid, offsets, at=now())

    (trace,) = chart(open_fleet())["data"]

    assert trace["y"] == [f"GPU-1 · {H200}", f"GPU-2 · {H200}"]
    assert numbers(trace["x"]) == pytest.approx([-0.995, 1.005], abs=1e-3)
    assert numbers(trace["error_x"]["array"])[0] == pytest.approx(0.397, abs=1e-3)
    assert numbers(trace["error_x"]["arrayminus"])[0] == pytest.approx(0.198, abs=1e-3)


def test_devices_are_listed_by_their_last_sign_of_life(fleet, open_fleet):
    fleet.add(a_record(gpu="NVIDIA A100"))

    listed = table_rows(open_fleet(), of="power limit, W")

    assert [row["device"] for row in listed[:2]] == ["GPU-1", "GPU-2"]
    assert listed[0]["power limit, W"] == 700.0
    assert {row["device"]: row["last seen"] for row in listed[2:]} == {
        f"uuid of {H200}": "by no worker",
        "uuid of NVIDIA A100": "by no worker",
    }


def test_old_workers_and_runs_are_listed_on_request(store, open_fleet):
    run = a_run("old", status="interrupted", plan=tuple(CASES), created_at="2024-01-01T10:00:00Z")
    ago = now() - timedelta(days=300)
    with store.session() as session:
        begin_run(session, run, COMMIT)
        add_jobs(session, run.uuid, [JobInfo(case, expected_s=60.0) for case in CASES])
        register_worker(session, WorkerInfo("gone", "host", 1, DEVICES[0], {}), at=ago)

    app, everything = open_fleet(), open_fleet(all="on")

    assert "1 ended workers, 1 abandoned runs" in words(app)
    assert not [f for f in app.dataframe if "ago" in f.value or "jobs" in f.value]
    assert table_rows(everything, of="ago")
    assert table_rows(everything, of="jobs")


def test_imported_run_compares_its_gpus(store, open_fleet):
    records = [
        a_record(device=device, m=m, median_us=8.0 * slower, uuid=f"{device.uuid} {m}")
        for device, slower in zip(DEVICES, (1.0, 1.02), strict=True)
        for m in (1, 2, 4)
    ]
    store.add(*records)

    app = open_fleet()

    slow, fast = sorted(numbers(chart(app)["data"][0]["x"]), reverse=True)
    assert slow - fast == pytest.approx(2.0, abs=0.05)

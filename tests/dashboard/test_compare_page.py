"""The Compare page."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from made_models import a_decode, a_score
from made_results import COMMIT, H200, a_record, a_run, records_of
from page_content import charts, words
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.views.compare.frame import (
    APART,
    INTERLEAVED,
    ONE_RUN,
    compare_frame,
    mean_rows,
    pairs_of_runs,
)
from flexq_bench.db import queries
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.store import add_records
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night


@pytest.fixture
def two_nights(store):
    """Run `one` at commit 1, run `two` at commit 2, where flexq is 10 % slower at M = 8."""

    def fill(new):
        for name, order, day in (("one", 1, 20), ("two", 2, 21)):
            subject = f"Change {order}"
            commit = replace(COMMIT, sha=f"{order:040x}", topo_order=order, subject=subject)
            run = a_run(name, created_at=f"2025-11-{day}T10:00:00+00:00")
            fields = {"commit": commit, "created_at": run.created_at}
            slow = 1.1 if name == "two" else 1.0
            new.add(
                sharp(run, m=1, **fields),
                sharp(run, m=8, median_us=8.0 * slow, **fields),
                sharp(run, kernel="cublaslt-w8a8", median_us=12.0, **fields),
            )

    return store.once(fill)


def sharp(run: Any, median_us: float = 8.0, **changes: Any) -> Any:
    """A result known to ±0.2 %."""
    ends = {"ci_low_us": 0.998 * median_us, "ci_high_us": 1.002 * median_us}
    return a_record(run, median_us=median_us, **ends | changes)


def table(app: AppTest, key: str) -> pd.DataFrame:
    (frame,) = [f.value for f in app.dataframe if ("cases" in f.value) == (key == "means")]
    return frame


@pytest.mark.parametrize("kind", ["runs", "commits", "kernels"])
def test_one_alone_has_nothing_to_be_compared_with(store, open_compare, kind):
    store.add(a_record())

    app = open_compare(kind=kind)

    assert app.info
    assert not app.dataframe


def test_runs_are_compared_by_case_worst_first(two_nights, open_compare):
    app = open_compare()

    cases = table(app, "rows")
    assert cases["verdict"].tolist() == ["slower", "ambiguous", "ambiguous"]
    worst = cases.iloc[0]
    assert (worst["label"], worst["m"], worst["evidence"]) == ("flexq-w6a6", 8, APART)
    assert worst["change"] == pytest.approx(10.0)
    assert worst["low"] < 10.0 < worst["high"]
    assert "3 of 3 rows are of separate runs, which are not interleaved" in words(app)
    assert "not known, 1 % assumed" in words(app)


def test_runs_of_whole_models_are_not_among_those_compared(two_nights, open_compare):
    later = {"created_at": "2025-11-23T10:00:00+00:00"}
    with two_nights.session() as session:
        add_records(session, [a_decode("fp16", run=a_run("decode", suite="decode", **later))])
        add_records(session, [a_score("fp16", run=a_run("accuracy", suite="accuracy", **later))])

    app = open_compare()

    base, head = (box.value for box in app.selectbox if box.label in ("Base", "Head"))
    assert (base, head) == (a_run("one").uuid, a_run("two").uuid)
    assert len(table(app, "rows")) == 3


def test_both_charts_have_their_intervals(two_nights, open_compare):
    times, changes = charts(open_compare())

    (points,) = [t for t in times["data"] if t["name"] == "flexq-w6a6"]
    assert points["error_x"]["array"] == pytest.approx([0.016, 0.016])
    assert min(points["error_y"]["array"]) > 0
    (bars,) = [t for t in changes["data"] if t["name"] == "flexq-w6a6"]
    assert bars["x"] == pytest.approx([10.0, 0.0])
    assert min(bars["error_x"]["array"]) > 0
    assert "%" in changes["layout"]["xaxis"]["title"]["text"]


def test_the_link_says_which_two_runs(two_nights, open_compare):
    app = open_compare(base_runs=a_run("two").uuid[:8], head_runs=a_run("one").uuid[:8])

    assert table(app, "rows")["verdict"].tolist() == ["ambiguous", "ambiguous", "faster"]
    assert app.query_params["base-runs"] == a_run("two").uuid[:8]
    again = open_compare(**{name.replace("-", "_"): v for name, v in app.query_params.items()})
    assert table(again, "rows").equals(table(app, "rows"))


def test_a_link_to_a_run_that_is_gone_says_so(two_nights, open_compare):
    assert "ffffffff" in words(open_compare(base_runs="ffffffff"))


def test_the_verdict_of_an_interleaved_measurement_wins(two_nights, open_compare, compared):
    shas = [f"{order:040x}" for order in (1, 2)]
    commits = {sha: replace(COMMIT, sha=sha, topo_order=int(sha, 16)) for sha in shas}
    machine = Machine("cuda", DeviceInfo("GPU-1", H200, "cuda"))
    nothing = compared("flexq-w6a6", 1.0, base=1, head=2, shape=(8, 4096, 4096))
    identity = machine.series_of(nothing.case)
    for name, sha, median in (("one", shas[0], 8.0), ("two", shas[1], 8.8)):
        there = identity | {"commit": commits[sha], "median_us": median}
        two_nights.add(sharp(a_run(name), uuid=f"of the series at {name}", **there))
    with two_nights.session() as session:
        record_night(session, [nothing], machine, commits, alerting=True)

    app = open_compare(kind="commits")

    cases = table(app, "rows")
    (row,) = cases[cases["evidence"] == INTERLEAVED].to_dict("records")
    assert (row["m"], row["verdict"]) == (8, "same")  # two runs apart say 10 % slower
    assert (row["base_us"], row["head_us"]) == (8.0, 8.8)
    assert row["low"] < row["change"] < row["high"] < 1
    assert "that verdict stands" in words(app)


def test_a_verdict_stands_alone_where_no_run_has_the_case(store, open_compare, compared):
    shas = [f"{order:040x}" for order in (1, 2)]
    commits = {sha: replace(COMMIT, sha=sha, topo_order=int(sha, 16)) for sha in shas}
    store.judge(compared("flexq-w6a6", 1.05, base=1, head=2), commits=commits)

    app = open_compare(kind="commits")

    assert table(app, "rows")["verdict"].tolist() == ["slower"]
    (changes,) = charts(app)  # without a stored time there is nothing to draw over another one
    assert "change" in changes["layout"]["xaxis"]["title"]["text"]


def test_two_commits_say_who_wrote_them(two_nights, open_compare):
    app = open_compare(kind="commits")

    head = next(box for box in app.selectbox if box.label == "Head")
    assert "0000000000 · Change 2 · Ada" in head.options[0]
    assert table(app, "rows")["verdict"].tolist() == ["slower", "ambiguous", "ambiguous"]


def test_two_kernels_are_compared_on_the_shapes_that_both_have(filled, open_compare):
    app = open_compare(
        kind="kernels", base_kernels="cublaslt-w8a8", head_kernels="flexq-w6a6", m="8"
    )

    cases = table(app, "rows")
    assert cases["change"].tolist() == pytest.approx([-100 / 3] * 2)
    assert set(cases["evidence"]) == {ONE_RUN}
    assert set(cases["m"]) == {8}


def test_kernels_whose_names_no_registry_has_can_be_compared(store, open_compare):
    names = ("My Kernel [v2]_b", "")
    store.add(*(a_record(kernel=name, m=m, model="", layer="") for name in names for m in (1, 8)))

    app = open_compare(kind="kernels", base_kernels=names[0], head_kernels=names[1])

    assert len(app.selectbox) >= 2


def test_the_file_has_what_the_filters_leave(two_nights, open_compare, monkeypatch):
    saved = []
    import streamlit as st

    monkeypatch.setattr(st, "download_button", lambda *args, **_: saved.append(args[1]))

    open_compare(verdict="slower")

    rows = pd.read_csv(io.StringIO(saved[0]))
    assert rows["verdict"].tolist() == ["slower"]
    assert {"base_us_low", "head_us_high", "ratio_low", "evidence", "head_run"} <= set(rows)


def test_link_has_parameters_of_the_shown_kind_only(two_nights, open_compare):
    app = open_compare(kind="kernels", base_runs=a_run("one").uuid[:8])

    assert "base-runs" not in app.query_params


def test_wrong_result_is_first_and_in_no_mean(store):
    one, two = a_run("one"), a_run("two")
    store.add(*records_of(one, m=[1]), a_record(two, status="incorrect", detail="y[0]"))
    with store.session() as session:
        sides = [queries.run_results(session, run.uuid) for run in (one, two)]

    frame = compare_frame(pairs_of_runs(*sides))

    assert frame["verdict"].iloc[0] == "incorrect"
    assert mean_rows(frame).empty


def nights(store: Any, medians: Any, *, first: int = 1, **changes: Any) -> None:
    """Scheduled runs at commits that follow each other; a time each, known to ±0.2 %."""
    for order, median in enumerate(medians, start=first):
        commit = replace(COMMIT, sha=f"{order:040x}", topo_order=order)
        when = f"2025-10-{order:02d}T10:00:00+00:00"
        run = a_run(f"night {order}", trigger="nightly", suite="nightly", created_at=when)
        store.add(sharp(run, median_us=median, commit=commit, created_at=when, **changes))


def test_difference_within_run_noise_is_not_slower(store, open_compare):
    # From run to run this series moves by 2 %; each run knows its own time to 0.2 %.
    nights(store, [8.0, 8.16, 7.9, 8.1, 7.95, 8.12, 7.9, 8.15])

    row = table(open_compare(), "rows").iloc[0]

    assert row["change"] == pytest.approx(100 * (8.15 / 7.9 - 1))
    assert row["verdict"] == "ambiguous"
    assert row["low"] < 0 < row["high"]


def test_mean_over_a_run_includes_shared_noise(store, open_compare):
    for m in (1, 2, 4, 8, 16, 32):
        nights(store, [8.0, 8.16, 7.9, 8.1, 7.95, 8.12, 7.9, 8.15], m=m)

    mean = table(open_compare(), "means").iloc[0]

    assert mean["cases"] == 6
    assert mean["ratio_low"] < 1 < mean["ratio_high"]


def test_default_pair_shares_cases_without_sweeps_or_cpus(store, open_compare):
    nights(store, [8.0, 8.1])
    other = a_run("other", suite="nightly", created_at="2025-10-01T20:00:00+00:00")
    store.add(sharp(other, m=512, created_at=other.created_at))
    late = "2025-10-20T10:00:00+00:00"
    sweep = a_run("sweep", suite="sweep", trigger="sweep", created_at=late)
    cpu = a_run("cpu", suite="smoke", created_at=late)
    store.add(sharp(sweep, created_at=late))
    store.add(sharp(cpu, backend="cpu", gpu="A CPU", created_at=late))

    app = open_compare()

    base, head = (box.value for box in app.selectbox if box.label in ("Base", "Head"))
    assert (base, head) == (a_run("night 1").uuid, a_run("night 2").uuid)
    assert table(app, "rows")["change"].notna().all()


def test_interleaved_rows_with_missing_cases_have_no_banner(store, open_compare, compared):
    shas = [f"{order:040x}" for order in (1, 2)]
    commits = {sha: replace(COMMIT, sha=sha, topo_order=int(sha, 16)) for sha in shas}
    nights(store, [8.0], m=512)
    nights(store, [8.0], first=2, m=1024)
    machine = Machine("cuda", DeviceInfo("GPU-1", H200, "cuda"))
    verdict = compared("flexq-w6a6", 1.05, base=1, head=2, shape=(8, 4096, 4096))
    with store.session() as session:
        record_night(session, [verdict], machine, commits, alerting=True)

    app = open_compare(kind="commits")

    assert INTERLEAVED in set(table(app, "rows")["evidence"])
    assert "not interleaved" not in words(app)


def test_kernels_of_a_model_match_by_shape(store, open_compare):
    of_llama = {"model": "llama-2-70b", "layer": "down_proj", "n": 8192, "k": 28672}
    store.add(
        sharp(a_run("one"), kernel="cublaslt-w8a8", median_us=12.0, **of_llama),
        sharp(a_run("one"), **of_llama | {"model": "llama-3-70b"}),
    )

    app = open_compare(kind="kernels", model="llama-2-70b")

    assert table(app, "rows")["change"].tolist() == [pytest.approx(100 * (8 / 12 - 1))]


def test_commits_of_the_only_project_are_compared(store, open_compare):
    for name, order in (("one", 1), ("two", 2)):
        commit = replace(COMMIT, sha=f"{order:040x}", topo_order=order, project="acme")
        run = a_run(name, suite="acme.suite", created_at=f"2025-11-2{order}T10:00:00+00:00")
        store.add(sharp(run, median_us=8.0 * order, commit=commit, project="acme"))

    for kind in ("commits", "runs"):
        text = words(open_compare(kind=kind))
        assert "compare 0000000000 0000000000 --project ." in text
        assert "--suite" not in text


def test_runs_of_two_projects_say_how_their_kernels_are_compared(store, open_compare):
    for name, day, project in (("one", 1, ""), ("two", 2, "acme")):
        commit = replace(COMMIT, project=project)  # of one repository
        run = a_run(name, created_at=f"2025-11-2{day}T10:00:00+00:00")
        fields = {"commit": commit, "project": project, "created_at": run.created_at}
        store.add(sharp(run, median_us=8.0 * day, **fields))

    text = words(open_compare(kind="runs"))

    assert "a kernel of each, as they are of two projects, acme and flexq-bench" in text
    assert "compare FILE_OF_acme.KERNEL KERNEL --kernels-from FILE_OF_acme.py" in text
    assert "of one commit" not in text

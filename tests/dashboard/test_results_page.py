"""The Results page."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import Any

from made_results import H200, a_record, a_run, records_of
from page_content import markdown
from streamlit.testing.v1 import AppTest


def table(app: AppTest) -> Any:
    return app.dataframe[0].value


def test_a_missing_database_is_one_line_and_no_exception(store, open_results, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_DB", "/nowhere/at/all.sqlite")

    app = open_results()

    assert [error.value for error in app.error]
    assert not app.dataframe


def test_every_result_of_the_latest_run_is_in_the_table(filled, open_results):
    shown = table(open_results())

    assert len(shown) == 2 * 2 * 2
    speedups = shown[shown["kernel"] == "flexq-w6a6"]["speedup"]
    assert set(speedups.round(3)) == {1.5}


def test_a_link_narrows_the_table(filled, open_results):
    app = open_results(kernel="flexq-w6a6", m="8")

    shown = table(app)
    assert set(shown["kernel"]) == {"flexq-w6a6"}
    assert set(shown["m"]) == {8}


def test_a_filter_chosen_on_the_page_goes_into_the_link(filled, open_results):
    app = open_results()
    kernels = next(widget for widget in app.multiselect if widget.label == "Kernel")

    app = kernels.select("flexq-w6a6").run()

    assert set(table(app)["kernel"]) == {"flexq-w6a6"}
    assert app.query_params["kernel"] == "flexq-w6a6"


def test_link_to_a_missing_run_says_so(filled, open_results):
    app = open_results(kernel="no-such-kernel")

    assert "no-such-kernel" in markdown(app).replace("\\", "")
    assert len(table(app)) == 8


def test_an_incorrect_result_is_flagged_and_never_compared(store, open_results):
    run = a_run()
    good, bad = records_of(run, m=[1])[:2]
    wrong = a_record(
        run, kernel=bad.kernel, m=1, model="llama-7b", layer="o_proj", status="incorrect",
        detail="y[0,0] = 1, expected 2", accepted=False, exact=False,
    )  # fmt: skip
    store.add(good, wrong)

    app = open_results()

    assert any("incorrect" in error.value for error in app.error)
    shown = table(app)
    assert shown[shown["status"] == "incorrect"]["speedup"].isna().all()


def test_one_result_alone_is_shown(store, open_results):
    store.add(a_record())

    assert len(table(open_results())) == 1


def test_a_run_without_results_yet_says_so(store, open_results):
    store.declare(a_run(status="running", plan=("flexq-w6a6 gemm cold m1n4096k4096",)))

    app = open_results()

    assert markdown(app)
    assert not app.dataframe


def test_text_from_records_is_never_markup(store, open_results):
    store.add(a_record(layer="<b>x</b>", model="[a](http://example.org)"))

    app = open_results()

    assert "<b>x</b>" not in markdown(app)


def test_unfinished_run_says_how_to_resume(store, open_results):
    done = a_record(a_run(status="failed", plan=("one", "two")))
    store.add(replace(done, case="one"))

    text = markdown(open_results(run=done.run.uuid[:8]))

    assert "failed: 1 of 2 planned cases have no result" in text
    assert f"run --resume {done.run.uuid[:8]}" in text


def test_complete_run_is_shown_and_newer_unfinished_run_named(filled, open_results):
    newer = a_run("newer", status="interrupted", created_at="2025-11-22T10:00:00+00:00")
    filled.declare(replace(newer, plan=("a",)))

    app = open_results()

    assert f"run --resume {newer.uuid[:8]}" in markdown(app)
    assert len(table(app)) == 8


def test_cpu_and_gpu_results_are_charted_one_at_a_time(store, open_results):
    on_cpu = a_run("cpu")
    store.add(*records_of(m=[1]), *records_of(on_cpu, m=[1], backend="cpu", gpu="A CPU"))

    for run, gpu in ((on_cpu, "A CPU"), (a_run(), H200)):
        both = [measured.uuid[:8] for measured in (on_cpu, a_run())]
        app = open_results(run=both, chart=f"{run.uuid[:8]} {gpu}")

        assert len(table(app)) == 8  # of both, as the link asks for them
        assert len(app.get("plotly_chart")) == 2  # one chart of both would have raised
        assert [c.value for c in app.caption if c.value.startswith(f"{gpu} · gemm")]


def test_a_baseline_that_is_filtered_away_still_counts(filled, open_results):
    app = open_results(kernel="flexq-w6a6", baseline="flexq-w6a6")
    other = open_results(kernel="flexq-w6a6")

    assert set(table(app)["speedup"]) == {1.0}
    assert set(table(other)["speedup"].round(3)) == {1.5}


def test_floors_are_listed_on_request(filled, open_results):
    filled.add(a_record(kernel="read-6", m=1, floor_us=None, tops=None))

    assert "read-6" not in set(table(open_results())["kernel"])
    assert "read-6" in set(table(open_results(probes="on"))["kernel"])


def test_a_chart_that_has_nothing_to_draw_says_why(store, open_results):
    store.add(a_record(status="failed", median_us=None, floor_us=None, detail="boom"))

    app = open_results()

    assert "Nothing to draw" in markdown(app)
    assert set(table(app)["detail"]) == {"boom"}


def test_tables_of_another_version_are_one_line(store, open_results):
    with closing(sqlite3.connect(store.path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0001'")

    (error,) = open_results().error

    assert "flexq-bench db upgrade" in error.value.replace("\\", "")


def test_a_database_that_was_replaced_is_read_anew(filled, open_results):
    assert len(table(open_results())) == 8
    other = type(filled)(filled.path.with_name("other.sqlite"))
    other.add(a_record())

    other.path.replace(filled.path)

    assert len(table(open_results())) == 1


def test_clear_all_brings_every_control_to_its_default(filled, open_results):
    app = open_results(kernel="flexq-w6a6", m=["1"])
    (clear,) = (button for button in app.button if button.label == "Clear all")

    app = clear.click().run()

    assert len(table(app)) == 8
    assert app.query_params == {}

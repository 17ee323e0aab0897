"""Results as a frame and as a file for a spreadsheet."""

from __future__ import annotations

import io
from typing import Any

import pandas as pd
import pytest
from made_results import a_record, a_run, records_of

from flexq_bench.dashboard.shared.results_frame import COLUMNS, as_csv, narrowed, results_frame
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database

BASELINE = "cublaslt-w8a8"


def stored_results(store: Any) -> list[queries.ResultRow]:
    with open_database(str(store.path), read_only=True) as database, database.session() as session:
        return queries.results_table(session)


def test_each_run_is_compared_with_its_own_baseline(store: Any) -> None:
    for name, base_us in (("first", 12.0), ("second", 20.0)):
        run = a_run(name)
        store.add(a_record(run, kernel=BASELINE, median_us=base_us), a_record(run, median_us=10.0))

    frame = results_frame(stored_results(store), BASELINE)

    flexq = frame[frame["kernel"] == "flexq-w6a6"].set_index("run")["speedup"]
    assert flexq[a_run("first").uuid] == pytest.approx(1.2)
    assert flexq[a_run("second").uuid] == pytest.approx(2.0)
    assert set(frame[frame["kernel"] == BASELINE]["speedup"]) == {1.0}


def test_untimed_result_has_no_numbers(store: Any) -> None:
    store.add(
        a_record(
            status="failed", detail="boom", median_us=None, floor_us=None, tops=None, exact=None
        )
    )

    (row,) = results_frame(stored_results(store), BASELINE).to_dict("records")

    assert all(pd.isna(row[name]) for name in ("median_us", "speedup", "pct_of_floor", "tops"))
    assert (row["correct"], row["is_timed"]) == ("", False)


def test_no_results_are_a_frame_with_every_column() -> None:
    frame = results_frame([], BASELINE)

    assert list(frame.columns) == list(COLUMNS)
    assert as_csv(frame).startswith("label,kernel,")


def test_a_probe_is_no_result_to_draw(store: Any) -> None:
    store.add(a_record(kernel="read-6", tops=None, floor_us=None))

    (row,) = results_frame(stored_results(store), BASELINE).to_dict("records")

    assert (row["is_probe"], row["is_timed"]) == (True, False)


def test_a_filter_without_values_lets_everything_through(filled: Any) -> None:
    frame = results_frame(stored_results(filled), BASELINE)

    assert len(narrowed(frame, {"kernel": (), "m": (8,)})) == 4
    assert len(narrowed(frame, {"kernel": (), "m": ()})) == 8


def test_csv_has_full_precision_units_and_times_in_utc(store: Any) -> None:
    run = a_run()
    store.add(*records_of(run, m=[1]))
    frame = results_frame(stored_results(store), BASELINE)

    table = pd.read_csv(io.StringIO(as_csv(frame)), keep_default_na=False)

    assert list(table["median_us"]) == list(frame["median_us"])
    assert set(table["created_at"]) == {"2025-11-21T10:00:05+00:00"}
    assert set(table["commit"]) == set(frame["commit"])
    assert {"half_width_pct", "speedup_low", "baseline", "run", "gpu"} <= set(table.columns)
    assert not {"is_timed", "is_probe"} & set(table.columns)

"""Query plans of the dashboard's pages in each kind of database.

No page scans the measurements; only the page of one result reads raw samples.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from sqlalchemy import Engine, event
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.database import current_database
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.releases import store_releases
from flexq_bench.db.store import add_record, add_records
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night

VIEWS = Path(__file__).parents[2] / "dashboard" / "views"
PAGES = sorted(path.parent.name for path in VIEWS.glob("*/page.py"))
DRILL_DOWN = "measurement"  # the one page that reads raw samples, of one result
MEASURED = "00000000-0000-0000-0000-00000000abcd"
MORE = [
    ("compare", {"kind": "commits"}),
    ("compare", {"kind": "kernels"}),
    ("kernels", {"view": "gemm against linear"}),
]
RAW_SAMPLES = re.compile(r"\bsample\.")
LINKS = {DRILL_DOWN: {"uuid": MEASURED}, "history": {"show": "relative to a release"}}
GPUS = ("NVIDIA H200", "NVIDIA A100")
pytestmark = pytest.mark.usefixtures("one_scan_for_components")


@dataclass(frozen=True, slots=True)
class Query:
    statement: str
    parameters: Any


@pytest.fixture(scope="session")
def filled(make_url, build, compared, commits):
    """URL of a database with three runs on two GPUs, samples and an alert."""
    url = make_url()
    with open_database(url) as database, database.session() as session:
        for order in (1, 2, 3):
            run = build.a_run(f"run {order}", created_at=f"2025-11-2{order}T10:00:00+00:00",
                              plan=("never came",))  # fmt: skip
            for gpu in GPUS:
                for m in (1, 8):
                    add_record(
                        session,
                        build.a_record(
                            gpu, run=run, gpu=gpu, m=m, commit=build.a_commit(order),
                            device=build.a_device(uuid=gpu, sku=gpu),
                        ),
                    )  # fmt: skip
        add_record(session, build.a_record(uuid=MEASURED, m=16))
        add_record(session, build.a_record("linear", stage="linear", case="linear"))
        add_records(session, [build.an_accuracy_record()])
        add_records(session, [build.a_gate_record()])
        add_records(session, [build.a_decode_record(), build.a_serving_record()])
        store_releases(session, {"v1": build.a_commit(2).sha})
        machine = Machine("cuda", DeviceInfo("GPU-1", GPUS[0], "cuda"))
        slow = compared("flexq-w6a6", 1.05, shape=(1, 4096, 4096))
        record_night(session, [slow], machine, commits, alerting=True)
    return url


@pytest.fixture
def opened(filled, monkeypatch):
    """Open a page and return its queries: opened("history", show="levels")."""
    monkeypatch.setenv("FLEXQ_BENCH_DB", filled)
    queries: list[Query] = []

    def listen(_c, _cursor, statement, parameters, *_):
        queries.append(Query(statement, parameters))

    def open_page(page, **link):
        app = AppTest.from_string(
            f"from flexq_bench.dashboard.views.{page}.page import page\npage()", default_timeout=30
        )
        for name, value in link.items():
            app.query_params[name] = value
        event.listen(Engine, "before_cursor_execute", listen)
        try:
            app.run()
        finally:
            event.remove(Engine, "before_cursor_execute", listen)
        assert not app.exception, app.exception
        assert not app.error, app.error
        return [q for q in queries if q.statement.lstrip().startswith(("SELECT", "WITH"))]

    st.cache_resource.clear()
    yield open_page
    current_database().close()
    st.cache_resource.clear()


@pytest.fixture
def database(filled):
    with open_database(filled) as opened_database:
        yield opened_database


def scans(connection, query):
    """Return the parts of the plan that scan all measurements."""
    if connection.dialect.name == "sqlite":
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query.statement}", query.parameters)
        return [row.detail for row in plan if row.detail.startswith("SCAN measurement")]
    # PostgreSQL scans a table of few rows; without that option its plan is that for many rows.
    connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
    plan = connection.exec_driver_sql(f"EXPLAIN (FORMAT JSON) {query.statement}", query.parameters)
    content = plan.scalar_one()
    root = json.loads(content) if isinstance(content, str) else content
    return [str(node) for node in _nodes(root[0]["Plan"]) if _scans_all(node)]


def _nodes(node):
    yield node
    for part in node.get("Plans", ()):
        yield from _nodes(part)


def _scans_all(node):
    """Return True unless a node looks up values in an index; an index can be scanned too."""
    reads = node.get("Relation Name") == "measurement"
    return reads and not {"Index Cond", "Recheck Cond"} & node.keys()


@pytest.mark.parametrize(
    ("page", "link"), [*((page, LINKS.get(page, {})) for page in PAGES), *MORE]
)
def test_no_page_scans_the_measurements_or_reads_samples(opened, database, page, link):
    queries = opened(page, **link)

    assert queries
    reads_samples = [query.statement for query in queries if RAW_SAMPLES.search(query.statement)]
    assert bool(reads_samples) == (page == DRILL_DOWN)
    with database.engine.connect() as connection:
        assert [scan for query in queries for scan in scans(connection, query)] == []


def test_scan_of_measurements_is_detected(database):
    everything = Query("SELECT median_us FROM measurement WHERE detail = ''", ())
    through_an_index = Query("SELECT created_at FROM measurement ORDER BY created_at", ())

    with database.engine.connect() as connection:
        assert scans(connection, everything)
        assert scans(connection, through_an_index)

"""Databases of records, and pages that read them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

sys.path.insert(0, str(Path(__file__).parent))  # its helpers: made_results, page_content, …

from browsing import headless
from made_results import COMMIT, H200, records_of
from page_content import OpenPage

from flexq_bench.db.engine import Session, open_database
from flexq_bench.db.exchange import import_file, write_records
from flexq_bench.db.records import DeviceInfo, Record, RunInfo
from flexq_bench.db.store import add_records, begin_run
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import Night, record_night

FIRST_NIGHT = datetime(2026, 1, 1, tzinfo=UTC)
APP = Path(__file__).parents[2] / "dashboard" / "app.py"


@pytest.fixture(scope="session", autouse=True)
def _one_scan(one_scan_for_components: None) -> None:
    """Scan for components once for all tests of pages."""


_filled: dict[tuple[str, str], list[bytes]] = {}


class Store:
    """A new database that the app reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        open_database(str(path)).close()

    def add(self, *records: Record) -> None:
        file = self.path.with_suffix(".jsonl")
        write_records(file, records)
        with open_database(str(self.path)) as database, database.session() as session:
            import_file(session, file)

    def once(self, fill: Callable[[Store], object]) -> Store:
        """Fill it, or copy what this function filled another one with."""
        content = _filled.setdefault((fill.__module__, fill.__qualname__), [])
        if content:
            self.path.write_bytes(content[0])
        else:
            fill(self)
            content.append(self.path.read_bytes())
        return self

    def keep(self, *records: Any) -> Store:
        """Store records of scores, decodes, servings or gates."""
        with self.session() as session:
            add_records(session, records)
        return self

    def judge(
        self, *comparisons: Any, night: int = 1, commits: Mapping[str, Any], **changes: Any
    ) -> Night:
        """Store the verdicts of a night on an H200, with alerts."""
        judged_at = FIRST_NIGHT + timedelta(days=night)
        options = {"alerting": True, "at": judged_at} | changes
        machine = Machine("cpu", DeviceInfo("GPU-1", H200, "cpu"))
        with open_database(str(self.path)) as database, database.session() as session:
            return record_night(session, comparisons, machine, commits, **options)

    @contextmanager
    def session(self) -> Iterator[Session]:
        with open_database(str(self.path)) as database, database.session() as session:
            yield session

    def declare(self, run: RunInfo) -> None:
        with open_database(str(self.path)) as database, database.session() as session:
            begin_run(session, run, COMMIT)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty database."""
    path = tmp_path / "results.sqlite"
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(path))
    return Store(path)


@pytest.fixture
def filled(store: Store) -> Store:
    """Two kernels on two layers at M = 1 and 8 on an H200."""
    return store.once(lambda new: new.add(*records_of()))


@pytest.fixture
def open_app() -> Iterator[OpenPage]:
    """Open the app, with the parameters of a link; a page must never raise."""

    def opened(**link: str | list[str]) -> AppTest:
        app = AppTest.from_file(str(APP), default_timeout=30)
        for name, value in link.items():
            app.query_params[name.replace("_", "-")] = value
        app.run()
        assert not app.exception, app.exception
        return app

    yield opened
    st.cache_resource.clear()


@pytest.fixture
def open_page(open_app: OpenPage) -> OpenPage:
    """open_page("results", m="8"): one page by itself.

    AppTest opens the app's first page only, and loses that one at the second run.
    """

    def opened(name: str, **link: str | list[str]) -> AppTest:
        app = AppTest.from_string(
            f"from flexq_bench.dashboard.views.{name}.page import page\npage()", default_timeout=30
        )
        for key, value in link.items():
            app.query_params[key.replace("_", "-")] = value
        app.run()
        assert not app.exception, app.exception
        return app

    return opened


def _opening(page: str) -> Any:
    """A fixture that opens one page: open_alert(alert="3")."""

    @pytest.fixture(name=f"open_{page}")
    def opening(open_page: OpenPage) -> OpenPage:
        return partial(open_page, page)

    return opening


open_home = _opening("home")
open_leaderboard = _opening("leaderboard")
open_triage = _opening("triage")
open_alert = _opening("alert")
open_history = _opening("history")
open_measurement = _opening("measurement")
open_compare = _opening("compare")
open_kernels = _opening("kernels")
open_sweep = _opening("sweep")
open_paper = _opening("paper")
open_results = _opening("results")
open_accuracy = _opening("accuracy")
open_pareto = _opening("pareto")
open_ship = _opening("ship")
open_decode = _opening("decode")
open_engines = _opening("engines")
open_fleet = _opening("fleet")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    """A headless Chromium that saves files below tmp_path."""
    with headless(tmp_path) as driver:
        yield driver

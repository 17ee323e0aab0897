"""A database for each test, and a machine on which commits are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from flexq_bench.db.engine import Database, Session, open_database
from flexq_bench.db.records import DeviceInfo
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import Night, record_night

FIRST_NIGHT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    with open_database(str(tmp_path_factory.mktemp("verdicts") / "db.sqlite")) as opened:
        yield opened


@pytest.fixture
def session(template: Database) -> Iterator[Session]:
    """On an empty database; rolled back at the end."""
    with Session(template.engine) as opened:
        yield opened


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine("cpu", DeviceInfo("CPU-1", "A CPU", "cpu"))


@pytest.fixture
def record(session: Session, machine: Machine, commits) -> Callable[..., Night]:
    """record(comparison, …, night=2): stores the verdicts of a night, alerting."""

    def store(*comparisons, night: int = 1, on: Machine = machine, alerting: bool = True) -> Night:
        at = FIRST_NIGHT + timedelta(days=night)
        return record_night(session, comparisons, on, commits, alerting=alerting, at=at)

    return store

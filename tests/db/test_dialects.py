"""Operations that SQLite and PostgreSQL do differently."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from flexq_bench.db.dialects import database_time, insert_rows
from flexq_bench.db.store import begin_run
from flexq_bench.db.tables import Environment, Night, Run, Sample

AWKWARD = 'ü "quoted" \\n \\u0041 \u2028 ☃'


def test_text_numbers_and_nested_values_are_kept(session):
    contents = [{"text": AWKWARD}, {"number": 0.1, "list": [1, 1e300, None]}, {}]
    rows = [
        {"content": content, "fingerprint": f"{AWKWARD}{i}"} for i, content in enumerate(contents)
    ]

    insert_rows(session.connection(), Environment.__table__, rows)

    stored = session.execute(
        select(Environment.content, Environment.fingerprint).order_by(Environment.id)
    )
    assert [{"content": c, "fingerprint": f} for c, f in stored] == rows


def test_empty_list_of_rows_is_inserted(session):
    insert_rows(session.connection(), Environment.__table__, [])

    assert session.scalars(select(Environment.id)).all() == []


def test_times_are_kept_and_invalid_rows_refused(session, run_id):
    at = datetime(2025, 11, 21, 10, 0, 0, 123456, tzinfo=UTC)
    row = {"key": "k", "name": "n", "suite": "s", "gpu": "g", "run_id": run_id, "state": "done",
           "report": {"a": [1.5]}, "updated_at": at}  # fmt: skip

    insert_rows(session.connection(), Night.__table__, [row])

    night = session.scalars(select(Night)).one()
    assert (night.updated_at, night.report) == (at, {"a": [1.5]})
    with pytest.raises(IntegrityError):
        insert_rows(
            session.connection(),
            Sample.__table__,
            [{"measurement_id": 99, "count": 1, "placement_counts": [1], "data": b"\x00\xff"}],
        )


@pytest.fixture
def run_id(session, build):
    begin_run(session, build.a_run(), build.a_commit())
    return session.scalar(select(Run.id))


def test_database_time_is_close_to_the_host_s_clock(database):
    with database.session() as session:
        apart = abs(database_time(session) - datetime.now(UTC))

    assert apart < timedelta(seconds=60)

"""Properties of stored histories: what must not change their change points."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from flexq_bench.ci.history_alerts import judge_histories
from flexq_bench.db import queries
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.store import add_records
from flexq_bench.exchange.external.records import Origin, external_records
from flexq_bench.exchange.external.result import ExternalResult, Reading

START = datetime(2025, 1, 1, tzinfo=UTC)
PROJECTS = count()

SERIES = st.tuples(
    st.lists(st.tuples(st.integers(12, 25), st.floats(50.0, 500.0)), min_size=2, max_size=3),
    st.integers(0, 1000),
)
given_series = given(SERIES, st.integers(0, 10_000))
drawn = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def values_of(series):
    levels, seed = series
    noise = random.Random(seed)
    return [level * (1 + 0.005 * noise.gauss(0, 1)) for size, level in levels for _ in range(size)]


def commits(size, *, first=1, parent=None, branch="main"):
    made = []
    for number in range(first, first + size):
        sha = f"{number:040x}"
        parents = () if parent is None else (parent,)
        made.append(CommitInfo(sha, parent, None, dirty=False, parents=parents, branch=branch))
        parent = sha
    return made


def records_of(project, values, measured, *, start=START):
    records = []
    for at, (value, commit) in enumerate(zip(values, measured, strict=True)):
        time = (start + timedelta(hours=at)).isoformat()
        of_project = replace(commit, project=project)
        origin = Origin(project, of_project, "G", time=time, occasion=f"{commit.sha} {time}")
        records += external_records(Reading((ExternalResult("gemm", "", value),)), origin)[0]
    return records


def found(session, project):
    """Judge the project's series; return its change points and its alerts."""
    (series,) = [row.id for row in queries.project_series(session) if row.project == project]
    judge_histories(session, [series])
    points = queries.change_points_of(session, series)
    alerts = [one for one in queries.alerts(session) if one.bad.project == project]
    return (
        [(point.commit, point.before, point.after) for point in points],
        [(alert.state, alert.bad.sha) for alert in alerts],
    )


def stored(session, values, **options):
    project = f"p{next(PROJECTS)}"
    records = records_of(project, values, commits(len(values)), **options)
    add_records(session, records)
    return project, records


@given_series
@drawn
def test_shift_in_time_changes_nothing(session, series, hours):
    values = values_of(series)
    project, _ = stored(session, values)
    later, _ = stored(session, values, start=START + timedelta(hours=hours))

    assert found(session, project) == found(session, later)


@given_series
@drawn
def test_records_stored_again_change_nothing(session, series, seed):
    project, records = stored(session, values_of(series))
    before = found(session, project)

    add_records(session, random.Random(seed).sample(records, len(records)))

    assert found(session, project) == before


@given_series
@drawn
def test_side_branch_changes_nothing_on_main(session, series, seed):
    values = values_of(series)
    project, _ = stored(session, values)
    before = found(session, project)
    fork = random.Random(seed).randrange(len(values))
    side = commits(8, first=1000, parent=f"{fork + 1:040x}", branch="feature")

    later = START + timedelta(days=300)
    add_records(session, records_of(project, [700.0] * 8, side, start=later))

    assert found(session, project) == before


@pytest.mark.parametrize("sizes", [(20, 40)])
def test_queries_of_another_commit_do_not_grow_with_the_history(session, sizes):
    asked = []
    listener = asked.append
    counts = []
    event.listen(session.get_bind(), "before_cursor_execute", lambda *call: listener(call[2]))
    for size in sizes:
        project = f"p{next(PROJECTS)}"
        noise = random.Random(1)
        values = [100 + noise.gauss(0, 0.5) for _ in range(size + 1)]
        records = records_of(project, values, commits(size + 1))
        add_records(session, records[:-1])
        found(session, project)
        asked.clear()
        add_records(session, records[-1:])
        found(session, project)
        counts.append(len(asked))

    assert counts[0] == counts[1] > 0

"""Projects of one repository, and a fork of it: the same commits, and rows of their own."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect, text

from flexq_bench.db import queries, schema
from flexq_bench.db.decisions import (
    add_decisions,
    join_alert,
    open_alert,
    set_alert_state,
)
from flexq_bench.db.engine import open_database, upgrade
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.nightly import add_change_point
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import Record
from flexq_bench.db.releases import store_releases
from flexq_bench.db.store import add_record, add_records, begin_run

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROJECTS = ("", "acme", "acme.attention")  # a name that begins with another one's


@pytest.fixture
def fill(build):
    """fill(session): a night of each project at commit 2, compared with commit 1, with an alert."""

    def store(session):
        for project in PROJECTS:
            first, second = (build.a_commit(order, project=project) for order in (1, 2))
            suite = f"{project}.nightly" if project else "nightly"
            run = build.a_run(project, suite=suite)
            record = build.a_record(project, run=run, commit=second, project=project)
            add_record(session, record)
            info = build.a_decision(record, uuid=project)
            add_decisions(session, [info])
            alert = open_alert(session, "w6a8", first.sha, second.sha, NOW, project=project)
            join_alert(session, alert, [project])
            set_alert_state(session, alert, "explained", person="", note="", at=NOW)
            add_change_point(session, project, second.sha, before=1.0, after=2.0)
            # A night on a device that was absent: a run without results.
            begin_run(session, build.a_run(f"{project} absent", suite=suite), second)
        add_records(session, [build.an_accuracy_record(commit=build.a_commit(2))])
        store_releases(session, {"v1": build.a_commit(1).sha})

    return store


@pytest.fixture
def filled(session, fill):
    fill(session)
    return session


@pytest.mark.parametrize("project", PROJECTS)
def test_each_project_has_its_own_rows(filled, build, project):
    sha = build.a_commit(2).sha

    between = queries.commits_between(filled, 0, 9, project=project)
    assert [row.project for row in between] == [project] * 2
    assert len(queries.recent_commits(filled, limit=9, prefixes=[sha], project=project)) == 2
    assert [row.name for row in queries.releases(filled, project=project)] == ["v1"]
    assert queries.verdicts_of_commit(filled, None, project=project) == {"slower": 1}
    assert queries.verdicts_of_commit(filled, sha[:9], project=project) == {"slower": 1}
    [run] = queries.latest_runs(filled, project=project).values()
    assert run.suite == (f"{project}.nightly" if project else "nightly")
    [result] = queries.results_at_commit(filled, sha, project=project)
    assert result.series_id in {
        row.id for row in queries.list_series(filled, Filters(projects=(project,)))
    }
    [alert] = [alert for alert in queries.alerts(filled) if alert.bad.project == project]
    assert alert.good.project == project
    [record] = queries.stored_records(filled, Record, Filters(projects=(project,)))
    assert (record.project, record.commit.project) == (project, project)


def test_commits_of_other_projects_are_not_found(filled, build):
    sha = build.a_commit(2).sha

    assert queries.results_at_commit(filled, sha, project="other") == []
    assert queries.recent_commits(filled, limit=9, prefixes=[sha], project="other") == []
    with pytest.raises(NotFoundError, match=rf"^no commit {sha} of project other is stored: "):
        open_alert(filled, "w6a8", sha, sha, NOW, project="other")


def test_tag_of_one_project_leaves_other_projects(filled, build):
    moved = {"v1": build.a_commit(2).sha}

    assert store_releases(filled, moved, project="acme") == ["v1"]
    shas = {name: queries.releases(filled, project=name)[0].sha for name in PROJECTS}
    assert shas == {**dict.fromkeys(PROJECTS, build.a_commit(1).sha), "acme": moved["v1"]}


def test_commit_is_stored_in_the_project_of_its_record(session, build, add):
    """As files that were exported while projects shared the rows of commits have it."""
    commit = build.a_commit(project="acme")
    add(project="gemm", commit=commit)

    [record] = queries.stored_records(session, Record)
    assert record.commit.project == "gemm"
    assert queries.recent_commits(session, limit=9, project="acme") == []


def _references(connection):
    """Each row that refers to a commit, by names that stay, with the project of that commit."""
    of_series = (
        "SELECT '{0} ' || s.project, c.project FROM {0} x JOIN series s ON s.id = x.series_id"
    )
    of_alert = (
        "SELECT '{0} ' || d.uuid, c.project FROM alert x JOIN decision d ON d.alert_id = x.id"
    )
    of_run = "SELECT '{0} ' || x.suite || x.uuid, c.project FROM run x"
    of_release = "SELECT '{0}', c.project FROM release x"
    of_accuracy = "SELECT '{0}', c.project FROM accuracy_result x"
    rows = []
    for query, table, columns in (
        (of_series, "measurement", ("commit_id",)),
        (of_series, "change_point", ("commit_id",)),
        (of_series, "epoch_break", ("commit_id",)),
        (of_series, "decision", ("base_commit_id", "head_commit_id")),
        (of_alert, "alert", ("good_commit_id", "bad_commit_id")),
        (of_run, "run", ("commit_id",)),
        (of_release, "release", ("commit_id",)),
        (of_accuracy, "accuracy_result", ("commit_id",)),
    ):
        for column in columns:
            join = f'{query.format(table)} JOIN "commit" c ON c.id = x.{column}'
            rows += map(tuple, connection.execute(text(join)))
    return sorted(rows)


def test_upgrade_splits_shared_commits_and_downgrade_merges_them(database, fill):
    with database.session() as session:
        fill(session)
        records = list(queries.stored_records(session, Record))
    with database.engine.connect() as connection:
        before = _references(connection)
    address = f"sqlite:///{database.path}" if database.path else database.engine.url
    plain = create_engine(address)
    with plain.begin() as connection:
        command.downgrade(schema.alembic_config(connection), "0021")
        rows = connection.execute(text('SELECT id, sha, project FROM "commit"')).all()
        assert len(rows) == 2
        unique = inspect(connection).get_unique_constraints("release")
        assert [constraint["column_names"] for constraint in unique] == [["name"]]
        # The first project to store a commit need not have been this repository.
        connection.execute(text("UPDATE \"commit\" SET project = 'acme'"))
        assert {project for _, project in _references(connection)} == {"acme"}
    plain.dispose()

    # Not the quick tables: the revision itself is what is tried.
    assert upgrade(database).after == schema.revisions()[-1]
    with database.engine.connect() as connection:
        after = _references(connection)
        if database.path is not None:
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []
            assert connection.execute(text("PRAGMA foreign_keys")).scalar_one() == 1
    releases = [row for row in after if row[0] == "release"]
    assert releases == [("release", "acme")]
    assert [row for row in after if row not in releases] == [
        row for row in before if row[0] != "release"
    ]
    with open_database(_address(database)) as again, again.session() as session:
        assert list(queries.stored_records(session, Record)) == records


def _address(database):
    return str(database.path or database.engine.url.render_as_string(hide_password=False))

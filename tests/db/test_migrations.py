from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, inspect, text

from flexq_bench.db import queries, schema
from flexq_bench.db.engine import open_database, revision_of, upgrade
from flexq_bench.db.errors import NewerSchemaError, OlderSchemaError
from flexq_bench.db.fleet import JobInfo, add_jobs
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.db.records import Record
from flexq_bench.db.store import add_record
from flexq_bench.db.tables import Base


@pytest.fixture(autouse=True)
def by_migrations(quick_tables, monkeypatch):
    """Here new databases are made as they are for people."""
    monkeypatch.setattr(schema, "migrate", quick_tables)


@pytest.fixture
def old(tmp_path):
    """A database that only the first revision has made."""
    path = tmp_path / "old.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        command.upgrade(schema.alembic_config(connection), schema.revisions()[0])
    engine.dispose()
    return str(path)


def test_models_and_migrations_make_the_same_tables(database):
    with database.engine.connect() as connection:
        context = MigrationContext.configure(connection)

        assert compare_metadata(context, Base.metadata) == []


def test_difference_between_models_and_migrations_is_detected(database):
    with database.engine.connect() as connection:
        connection.execute(text("DROP INDEX ix_measurement_model_layer"))
        connection.execute(text('ALTER TABLE measurement ADD COLUMN "extra column" VARCHAR'))
        differences = compare_metadata(MigrationContext.configure(connection), Base.metadata)

        assert sorted(kind for kind, *_ in differences) == ["add_index", "remove_column"]


def test_downgrade_makes_the_table_that_the_newest_revision_dropped(database):
    with database.engine.begin() as connection:
        command.downgrade(schema.alembic_config(connection), "0028")
        columns = [c["name"] for c in inspect(connection).get_columns("reference_value")]
        command.upgrade(schema.alembic_config(connection), "head")

        assert {"fingerprint", "baseline", "bound", "task", "value"} < set(columns)
        assert "reference_value" not in inspect(connection).get_table_names()


def test_revisions_are_a_single_line():
    scripts = ScriptDirectory(str(schema.MIGRATIONS)).walk_revisions()

    assert schema.revisions() == tuple(script.revision for script in scripts)[::-1]


def test_older_database_is_refused_until_it_is_upgraded(old, build):
    with pytest.raises(OlderSchemaError, match=r"needs .*: run `flexq-bench db upgrade`"):
        open_database(old)

    with open_database(old, check_schema=False) as database:
        done = upgrade(database)
    first, *_, last = schema.revisions()
    assert (done.before, done.after, done.changed) == (first, last, True)

    with open_database(old) as database, database.session() as session:
        add_record(session, build.a_record())


def copy_rows(source, target):
    """All rows of a database into the columns that an older one has."""
    engine = create_engine(f"sqlite:///{target}")
    with engine.begin() as connection:
        connection.execute(text("ATTACH DATABASE :path AS source"), {"path": source})
        there = set(inspect(connection).get_table_names(schema="source")) - {"alembic_version"}
        for table in sorted(there & set(inspect(connection).get_table_names())):
            columns = [f'"{column["name"]}"' for column in inspect(connection).get_columns(table)]
            names = ", ".join(columns)
            statement = f'INSERT INTO "{table}" ({names}) SELECT {names} FROM source."{table}"'
            connection.execute(text(statement))
    engine.dispose()


def test_upgrade_keeps_what_is_stored(old, build, tmp_path):
    record, new = build.a_record(), str(tmp_path / "new.sqlite")
    with open_database(new) as database, database.session() as session:
        add_record(session, record)
    copy_rows(new, old)
    with open_database(old, check_schema=False) as database:
        upgrade(database)
        with database.session() as session:
            assert list(queries.stored_records(session, Record)) == [record]


@pytest.mark.parametrize("state", ["measuring", "comparing"])
def test_unfinished_night_of_the_version_before_comparison_jobs_is_kept(build, tmp_path, state):
    new, before = str(tmp_path / "new.sqlite"), tmp_path / "before.sqlite"
    record = build.a_record()
    with open_database(new) as database, database.session() as session:
        add_record(session, record)
        info = NightInfo("night", "2025-11-01", "smoke", "A GPU", record.run.uuid)
        set_night(session, info, state, at=datetime.now(UTC))
        add_jobs(session, record.run.uuid, [JobInfo("a case"), JobInfo("another", reason="gone")])
    engine = create_engine(f"sqlite:///{before}")
    with engine.begin() as connection:
        command.upgrade(schema.alembic_config(connection), "0024")
    engine.dispose()
    copy_rows(new, before)

    with open_database(str(before), check_schema=False) as database:
        upgrade(database)
        with database.session() as session:
            [night] = queries.unfinished_nights(session)
            jobs = queries.jobs_of(session, record.run.uuid)
            assert queries.jobs_of(session, record.run.uuid, kind="compare") == []
    assert (night.state, night.plan) == (state, None)  # it is planned when it is resumed
    assert [(job.kind, job.state, job.content) for job in jobs] == [
        ("measure", "queued", None),
        ("measure", "no-device", None),
    ]


def test_upgrading_twice_changes_nothing(database):
    assert upgrade(database).changed is False


def test_failed_upgrade_leaves_the_old_tables(old, monkeypatch):
    real = command.upgrade

    def breaking(config, revision):
        real(config, revision)
        raise RuntimeError("power cut")

    monkeypatch.setattr(command, "upgrade", breaking)
    with open_database(old, check_schema=False) as database:
        with pytest.raises(RuntimeError, match="power cut"):
            upgrade(database)
        assert revision_of(database) == schema.revisions()[0]
        assert "decision" not in inspect(database.engine).get_table_names()


def test_database_of_a_later_version_is_refused_unchanged(database):
    url = str(database.path or database.engine.url.render_as_string(hide_password=False))
    with database.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(NewerSchemaError, match="revision 9999, this version knows up to"):
        open_database(url)
    with pytest.raises(NewerSchemaError, match="upgrade flexq-bench"):
        upgrade(database)
    assert revision_of(database) == "9999"


def test_empty_server_asks_for_an_upgrade(empty_postgresql):
    with pytest.raises(OlderSchemaError, match="holds no tables yet: run `flexq-bench db upgrade`"):
        open_database(empty_postgresql)

    with open_database(empty_postgresql, check_schema=False) as database:
        assert upgrade(database).before is None
    open_database(empty_postgresql).close()


def test_migrations_are_found_from_any_folder(tmp_path):
    root = schema.MIGRATIONS.parents[1]
    script = "from flexq_bench.db.engine import open_database; open_database('here.sqlite').close()"

    subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": str(root)}, check=True
    )

    assert (tmp_path / "here.sqlite").stat().st_size > 0


def test_results_from_before_checkpoints_are_of_the_reference(tmp_path):
    """What had no column for it was evaluated on dequantized weights, and has no hash."""
    path = tmp_path / "old.sqlite"
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        command.upgrade(schema.alembic_config(connection), "0012")
        names = [column["name"] for column in inspect(connection).get_columns("accuracy_result")]
        values = ", ".join(f"'{index}'" for index in range(len(names)))
        connection.execute(text(f"INSERT INTO accuracy_result VALUES ({values})"))
        command.upgrade(schema.alembic_config(connection), "head")
        query = text("SELECT through, content_hash, scheme_version FROM accuracy_result")
        assert connection.execute(query).one() == ("reference", None, None)
    engine.dispose()

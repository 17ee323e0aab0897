"""Rescue of results if the SQLite file is deleted or replaced during a run."""

from __future__ import annotations

import shutil

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import FileMovedError
from flexq_bench.db.exchange import import_file
from flexq_bench.db.store import begin_run
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.suite_runs import measure_runs, plan_runs
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.workloads.suite import Group, Shape, Suite

SUITE = Suite("made", "", "", (Group(("flexq-w6a6",), (1, 2, 3), (Shape(256, 256, "o_proj"),)),))


def deleted(path):
    for one in path.parent.glob(f"{path.name}*"):
        one.unlink()


def replaced(path):
    copy = path.with_name("copy.sqlite")
    with open_database(str(copy)):
        pass
    copy.rename(path)


def folder_deleted(path):
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("lose", [deleted, replaced])
def test_results_are_rescued_if_the_database_file_is_lost(tmp_path, a_pool, a_result, commit, lose):
    folder = tmp_path / "data"
    path = folder / "flexq.sqlite"
    seen = []

    def on_record(record):
        seen.append(record.uuid)
        if len(seen) == 2:
            lose(path)

    with open_database(str(path)) as database:
        pool = a_pool(lambda case: a_result())
        planned = plan_runs(pool, SUITE, (), "manual")
        with pytest.raises(InfrastructureError, match=r"deleted or replaced.*3 results.*db import"):
            measure_runs(database, pool, planned, commit, on_record)

    [rescued] = folder.glob("*.jsonl")
    with open_database(str(tmp_path / "new.sqlite")) as other:
        with other.session() as session:
            import_file(session, rescued)
        with other.session() as session:
            records = list(queries.run_records(session, planned[0].run.uuid))
    assert [record.uuid for record in records][:2] == seen
    assert len(records) == 3  # and the one that was measured when it was noticed


def test_results_are_rescued_elsewhere_if_the_folder_is_lost(
    tmp_path, a_pool, a_result, commit, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    path = tmp_path / "data" / "flexq.sqlite"

    with open_database(str(path)) as database:
        pool = a_pool(lambda case: a_result())
        planned = plan_runs(pool, SUITE, (), "manual")
        with pytest.raises(InfrastructureError, match="deleted or replaced"):
            measure_runs(database, pool, planned, commit, lambda record: folder_deleted(path))

    assert len(list(tmp_path.glob("flexq.sqlite.*.jsonl"))) == 1


def test_open_database_does_not_recreate_its_file(tmp_path, commit):
    path = tmp_path / "flexq.sqlite"
    with open_database(str(path)) as database:
        database.engine.dispose()  # the next session connects anew
        deleted(path)
        with pytest.raises(FileMovedError), database.session() as session:
            begin_run(session, new_run("made", "manual", ()), commit)
    assert not path.exists()

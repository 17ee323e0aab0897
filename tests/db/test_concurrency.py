from __future__ import annotations

import subprocess
import sys

import pytest

from flexq_bench.db import schema
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import write_records
from flexq_bench.db.maintenance import stats

# In processes forked from one that has imported all they need. One record a transaction, as a run
# stores them, or a whole file in one.
TOGETHER = """
import os, sys
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file, read_records
from flexq_bench.db.store import add_record
def one_by_one(database, path):
    for record in list(read_records(path)):
        with database.session() as session:
            add_record(session, record)
def at_once(database, path):
    with database.session() as session:
        import_file(session, path)
add, url, *paths = sys.argv[1:]
children = []
for path in paths:
    children.append(os.fork())
    if not children[-1]:
        with open_database(url) as database:
            globals()[add](database, path)
        os._exit(0)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@pytest.mark.parametrize("add", ["one_by_one", pytest.param("at_once", marks=pytest.mark.slow)])
def test_two_processes_add_the_same_series_concurrently(make_url, tmp_path, build, add):
    shapes = range(1, 26)
    # One goes up, one goes down: with row locks alone they would wait for each other in a circle.
    up = [build.a_record("up", m=m, run=build.a_run("up")) for m in shapes]
    down = [build.a_record("down", m=m, run=build.a_run("down")) for m in reversed(shapes)]
    write_records(tmp_path / "up.jsonl", up)
    write_records(tmp_path / "down.jsonl", [*down, *up])
    url = make_url()  # on SQLite not made yet: they also race for its tables

    files = [str(tmp_path / f"{name}.jsonl") for name in ("up", "down")]
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER, add, url, *files],
        env={"PYTHONPATH": str(schema.MIGRATIONS.parents[1])},
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (0, "")
    with open_database(url) as database, database.session() as session:
        rows = stats(session).rows
    assert (rows["measurement"], rows["series"], rows["epoch"], rows["run"]) == (50, 25, 25, 2)

from __future__ import annotations

import subprocess
import sys

import pytest

from flexq_bench.db import schema
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import write_records
from flexq_bench.db.maintenance import stats

# One record a transaction, as a run stores them.
ONE_BY_ONE = """
import sys
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import read_records
from flexq_bench.db.store import add_record
url, path = sys.argv[1:]
records = list(read_records(path))
print("ready", flush=True)
sys.stdin.readline()
with open_database(url) as database:
    for record in records:
        with database.session() as session:
            add_record(session, record)
"""
# A whole file in one transaction.
AT_ONCE = """
import sys
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file
url, path = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
with open_database(url) as database, database.session() as session:
    import_file(session, path)
"""


def together(script, arguments):
    """Run the script in a process for each of the arguments, all let go at the same moment."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *each],
            env={"PYTHONPATH": str(schema.MIGRATIONS.parents[1])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in arguments
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[1] for process in processes]


@pytest.mark.parametrize("script", [ONE_BY_ONE, AT_ONCE], ids=["one by one", "at once"])
def test_two_processes_add_the_same_series_concurrently(make_url, tmp_path, build, script):
    shapes = range(1, 26)
    # One goes up, one goes down: with row locks alone they would wait for each other in a circle.
    up = [build.a_record("up", m=m, run=build.a_run("up")) for m in shapes]
    down = [build.a_record("down", m=m, run=build.a_run("down")) for m in reversed(shapes)]
    write_records(tmp_path / "up.jsonl", up)
    write_records(tmp_path / "down.jsonl", [*down, *up])
    url = make_url()  # on SQLite not made yet: they also race for its tables

    errors = together(script, [(url, str(tmp_path / f"{n}.jsonl")) for n in ("up", "down")])

    assert errors == ["", ""]
    with open_database(url) as database, database.session() as session:
        rows = stats(session).rows
    assert (rows["measurement"], rows["series"], rows["epoch"], rows["run"]) == (50, 25, 25, 2)

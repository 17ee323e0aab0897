"""Records and a database that an earlier version made: they import, open and resume.

`earlier_version/` was written by the program as of commit 77292ef on a CPU: suite `s` measured once
in full and once until Ctrl-C, tiny-llama evaluated under two schemes, and decoded under two.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.repository import provenance

EARLIER = Path(__file__).parent / "earlier_version"
INTERRUPTED = "143ec925"


@pytest.fixture
def earlier(cli, database):
    """The earlier version's database, upgraded, at the path that commands use."""
    database.parent.mkdir()
    database.write_bytes(gzip.decompress((EARLIER / "database.sqlite.gz").read_bytes()))
    assert cli("db", "upgrade").code == 0
    return database


def runs(cli):
    listed = json.loads(cli("list", "runs", "--json").out)
    return {run["run"][:8]: run for run in listed}


def test_earlier_records_import_once(cli, tmp_path):
    records = tmp_path / "records.jsonl"
    records.write_bytes(gzip.decompress((EARLIER / "records.jsonl.gz").read_bytes()))

    first = cli("db", "import", str(records))
    counted = cli("db", "stats", "--json").out
    second = cli("db", "import", str(records))

    assert (first.code, second.code) == (0, 0)
    assert len(records.read_text().splitlines()) == 24
    assert json.loads(cli("db", "stats", "--json").out) == json.loads(counted)
    assert len(runs(cli)) == 4


def test_earlier_database_opens_with_all_runs(cli, earlier):
    stored = runs(cli)

    assert [run["suite"] for run in stored.values()] == ["s", "decode", "accuracy", "s"]
    assert [run["status"] for run in stored.values()] == ["interrupted", *["complete"] * 3]
    assert cli("db", "export", str(earlier.with_name("again.jsonl"))).code == 0


@pytest.mark.slow
def test_earlier_interrupted_run_resumes(cli, earlier, monkeypatch):
    with_commit = runs(cli)[INTERRUPTED]["commit"]
    here = provenance.current_commit()
    monkeypatch.setattr(
        "flexq_bench.cli.measuring.current_commit",
        lambda: replace(here, sha=with_commit, dirty=False),
    )

    ran = cli("run", "--resume", INTERRUPTED)

    assert ran.code == 0, ran.err
    assert "stored 13 results" in ran.out
    assert runs(cli)[INTERRUPTED]["status"] == "complete"


def test_earlier_run_is_not_resumed_at_another_commit(cli, earlier):
    ran = cli("run", "--resume", INTERRUPTED)

    assert ran.code == 2
    assert "was begun at 77292ef021" in ran.error

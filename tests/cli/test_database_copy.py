"""`db copy`: a whole database in another one."""

from __future__ import annotations

import json

from flexq_bench.exit_codes import ExitCode


def test_copied_database_has_the_same_rows(cli, measured, tmp_path):
    target = str(tmp_path / "copy.sqlite")

    ran = cli("db", "copy", target, "--json")

    assert ran.code == ExitCode.PASS, ran.err
    stats = [
        json.loads(cli("db", "stats", "--json", "--db", path).out)["rows"]
        for path in (str(measured), target)
    ]
    assert stats[0] == stats[1]
    assert json.loads(ran.out)["rows"] == sum(stats[0].values())
    assert cli("list", "runs", "--json").out == cli("list", "runs", "--json", "--db", target).out


def test_database_with_rows_is_not_copied_to(cli, measured, tmp_path):
    target = str(tmp_path / "copy.sqlite")
    cli("db", "copy", target)

    assert "has rows already" in cli("db", "copy", target).error


def test_backup_of_all_tables_is_restored_by_import(cli, measured, tmp_path):
    backup, target = str(tmp_path / "all.jsonl.gz"), str(tmp_path / "restored.sqlite")

    written = cli("db", "export", backup, "--all", "--json")
    restored = cli("db", "import", backup, "--db", target, "--json")

    assert written.code == restored.code == ExitCode.PASS, restored.err
    assert json.loads(written.out)["rows"] == json.loads(restored.out)["rows"]
    stats = [
        json.loads(cli("db", "stats", "--json", "--db", path).out)["rows"]
        for path in (str(measured), target)
    ]
    assert stats[0] == stats[1]
    assert "has rows already" in cli("db", "import", backup, "--db", target).error
    assert cli("db", "export", backup, "--all", "--kernels", "x").code == ExitCode.USAGE

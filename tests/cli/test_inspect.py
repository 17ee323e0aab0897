"""`list`, `db` and `doctor`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flexq_bench.cli.kernel_rows import kernel_rows
from flexq_bench.exit_codes import ExitCode

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "what", ["kernels", "schemes", "suites", "models", "devices", "runs", "series"]
)
def test_every_list_has_table_and_json(cli, measured, what):
    people, machines = cli("list", what), cli("list", what, "--json")

    assert (people.code, machines.code) == (ExitCode.PASS, ExitCode.PASS)
    rows = json.loads(machines.out)
    assert rows
    assert str(next(iter(rows[0].values())))[:8] in people.out


def test_empty_lists_create_no_database(cli, database, tmp_path, monkeypatch):
    monkeypatch.delenv("FLEXQ_BENCH_DB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert json.loads(cli("list", "series", "--json").out) == []
    assert "measure something first" in cli("list", "runs").out
    assert not (tmp_path / "data").exists()


def test_model_runs_are_listed_with_results(cli, database):
    cli("db", "import", str(EXAMPLES / "h200" / "serving-llama-7b.jsonl.gz"))
    cli("db", "import", str(EXAMPLES / "h200" / "accuracy-smollm2.jsonl.gz"))

    rows = json.loads(cli("list", "runs", "--json").out)

    served = {row["results"] for row in rows if row["suite"] == "decode"}
    assert served == {"5/5", "6/6", "11/15"}  # the last run's others were measured again
    assert sum(int(row["results"]) for row in rows if row["suite"] == "accuracy") > 0
    assert {tuple(row["gpus"]) for row in rows} == {("NVIDIA H200",)}
    assert rows[0]["created_at"][:16].replace("T", " ") in cli("list", "runs").out


def test_list_kernels_of_one_backend(cli):
    rows = json.loads(cli("list", "kernels", "--backend", "cpu", "--json").out)

    assert {row["backend"] for row in rows} == {"cpu"}
    assert {"flexq-w6a6", "cublaslt-w8a8", "read-6"} <= {row["kernel"] for row in rows}


def test_export_and_import_copy_results_once(cli, measured, tmp_path: Path):
    file, other = str(tmp_path / "r.parquet"), str(tmp_path / "other.sqlite")

    assert json.loads(cli("db", "export", file, "--json").out)["records"] == 3
    first = json.loads(cli("db", "import", file, "--db", other, "--json").out)
    second = json.loads(cli("db", "import", file, "--db", other, "--json").out)

    assert (first[0]["added"], second[0]["added"]) == (3, 0)
    assert json.loads(cli("db", "stats", "--db", other, "--json").out)["rows"]["measurement"] == 3


def test_export_of_unknown_device_lists_stored_devices(cli, measured, tmp_path: Path):
    ran = cli("db", "export", str(tmp_path / "r.jsonl"), "--devices", "NVIDIA H2000")

    assert ran.code == ExitCode.USAGE
    assert "no device 'NVIDIA H2000': there is " in ran.error


def test_prune_deletes_samples_and_keeps_summaries(cli, measured):
    pruned = json.loads(cli("db", "prune", "--older-than", "0", "--json").out)["pruned"]

    rows = json.loads(cli("db", "stats", "--json").out)["rows"]
    assert (pruned, rows["sample"], rows["measurement"]) == (3, 0, 3)


def test_upgrade_creates_database_once(cli, database):
    first, second = cli("db", "upgrade"), cli("db", "upgrade")

    assert (first.code, second.code) == (ExitCode.PASS, ExitCode.PASS)
    assert database.exists()
    assert "up to date" in second.out


def test_doctor_passes_without_gpu_and_advises_on_missing_packages(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvmath", None)

    ran = cli("doctor", "--json")

    findings = {finding["name"]: finding for finding in json.loads(ran.out)}
    assert ran.code == ExitCode.PASS
    assert findings["torch"]["state"] == "ok"
    assert findings["nvmath"]["state"] == "missing"
    assert "flexq-bench[cuda1" in findings["nvmath"]["advice"]
    assert "GPU" in cli("doctor").out


def test_doctor_fails_for_broken_database(cli, database):
    database.parent.mkdir()
    database.write_text("not a database " * 100)

    ran = cli("doctor", "--json")

    states = {finding["name"]: finding["state"] for finding in json.loads(ran.out)}
    assert ran.code == ExitCode.INFRASTRUCTURE
    assert states["database"] == "broken"


def test_kernel_families_show_best_share_of_floor(cli, measured):
    lines = cli("list", "kernels").out.splitlines()

    assert len(lines) <= 46
    assert max(map(len, lines)) <= 100
    by_family = {line.split()[0]: line for line in lines}
    assert "ABQ-LLM W{2..8}A{2..8}" in by_family["abq-w{2..8}a{2..8}"]
    assert "w{4,6,8}a16" in by_family
    measured_share = by_family["cublas-fp16"].split()
    assert any(word.replace(".", "").isdigit() and "." in word for word in measured_share)
    assert "abq-w3a7" in cli("list", "kernels", "--all").out


def test_short_commands_import_no_package_that_computes(cli, measured):
    program = (
        "import sys; from flexq_bench.cli.app import main; main(['status', '--db', sys.argv[1]]); "
        "main(['alerts', 'list', '--state', 'all', '--db', sys.argv[1]]); "
        "sys.exit(bool({'numpy', 'alembic', 'torch'} & sys.modules.keys()))"
    )

    command = [sys.executable, "-c", program, str(measured)]
    ran = subprocess.run(command, check=False, capture_output=True)

    assert (ran.returncode, ran.stderr) == (0, b"")


def test_kernels_are_listed_without_torch_until_sources_change(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path))
    program = (
        "import sys; from flexq_bench.cli.app import main; main(['list', 'kernels', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )

    # Of processes with one path, which decides what is installed.
    first, second = (
        subprocess.run([sys.executable, "-c", program], check=False, capture_output=True)
        for _ in range(2)
    )
    (tmp_path / "kernel-list.json").write_text('{"state": "earlier", "rows": []}')

    assert (first.returncode, second.returncode) == (1, 0)
    assert json.loads(second.stdout) == json.loads(first.stdout) == kernel_rows()
    assert json.loads(cli("list", "kernels", "--json").out) == kernel_rows()


def test_many_series_are_listed_only_with_filter(cli, database):
    cli("db", "import", str(EXAMPLES / "h200" / "paper-fig10-flexq.parquet"))

    assert "series of" in cli("list", "series").out
    assert "narrow them with --kernel, --model or --gpu" in cli("list", "series").out
    rows = json.loads(cli("list", "series", "--json", "--kernel", "read-*").out)
    assert {row["kernel"] for row in rows} == {"read-6", "read-8"}
    assert "read-6" in cli("list", "series", "--kernel", "read-6").out
    ran = cli("list", "series", "--model", "x")  # no shape has a model
    assert (ran.code, "no model 'x'" in ran.error) == (ExitCode.USAGE, True)
    ran = cli("list", "series", "--gpu", "none")
    assert ran.code == ExitCode.USAGE
    assert "no kind of device 'none': there is NVIDIA H200" in ran.error

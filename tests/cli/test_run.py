"""`run` and `sweep` on the CPU backend, restricted to what takes a second or two."""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexq_bench.db.exchange import read_records
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.measure import Meter
from flexq_bench.measure.protocol import PROTOCOL_VERSION

TINY = ("run", "smoke", "--kernels", "cublas-fp16,cublaslt-w8a8", "--layers", "256x256")
TINY_CASES = {
    "empty gemm cold m1n1k1",
    "read-8 gemm hot m1n256k256",
    "read-16 gemm hot m1n256k256",
    "cublaslt-w8a8 gemm hot m4n256k256",
    "cublas-fp16 gemm hot m4n256k256",
}


@contextmanager
def interrupted_after(count):
    """Ctrl-C at the measurement after this many."""
    measure, done = Meter.measure, []

    def measure_or_interrupt(self, case):
        if len(done) == count:
            raise KeyboardInterrupt
        done.append(case)
        return measure(self, case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Meter, "measure", measure_or_interrupt)
        yield


def test_run_stores_its_plan_and_names_database(cli, database, tmp_path: Path):
    files = (tmp_path / "records.jsonl", tmp_path / "records.parquet")

    ran = cli(*TINY, "--json", str(files[0]), "--out", str(files[1]))

    assert ran.code == ExitCode.PASS
    assert ran.err == ""
    for file in files:
        records = list(read_records(file))
        assert {record.case for record in records} == TINY_CASES
        assert set(records[0].run.plan) == TINY_CASES
        assert records[0].run.status == "complete"
        assert {record.status for record in records} <= {"ok", "noisy"}
    table = ran.out
    assert "cublaslt-w8a8" in table
    assert str(database) in table
    assert f"dashboard --db {database}" in table.splitlines()[-1]
    rows = [line for line in table.splitlines()[:-4] if not line.startswith("noisy: ")]
    assert max(map(len, rows)) <= 120


def test_json_on_stdout_moves_messages_to_stderr(cli):
    ran = cli(*TINY, "--json", "-")

    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert {line["case"] for line in lines} == TINY_CASES
    assert all(line["run"] and line["commit"] and line["gpu"] for line in lines)
    assert "time µs" in ran.err


def test_both_regimes_of_case_give_two_series(cli):
    shape = ("--m", "1", "--n", "32", "--k", "32", "--regime", "boost,sustained")

    ran = cli("sweep", "--kernels", "cublas-fp16", *shape, "--json", "-")

    assert ran.code == ExitCode.PASS
    records = [json.loads(line) for line in ran.out.splitlines()]
    series = {record["case"]: (record["metric"], record["regime"]) for record in records}
    assert series["cublas-fp16 gemm cold m1n32k32"] == ("time", "boost")
    assert series["cublas-fp16 gemm cold m1n32k32 sustained"] == ("sustained_time", "sustained")
    assert all(record["protocol_version"] == PROTOCOL_VERSION for record in records)
    assert cli("sweep", *shape[:6], "--regime", "fast").code == ExitCode.USAGE


def test_interrupted_run_resumes_with_missing_cases_only(cli):
    with interrupted_after(2):
        ran = cli(*TINY, "--seed", "7")
    assert ran.code == INTERRUPTED
    stored = json.loads(cli("list", "runs", "--json").out)[0]
    assert (stored["status"], stored["results"]) == ("interrupted", "2/5")
    prefix = stored["run"][:8]
    assert f"run --resume {prefix}" in ran.err

    with interrupted_after(3):
        ran = cli("run", "--resume", prefix, "--json", "-")

    assert ran.code == ExitCode.PASS
    records = [json.loads(line) for line in ran.out.splitlines()]
    assert sorted(record["case"] for record in records) == sorted(TINY_CASES)
    assert {record["seed"] for record in records} == {7}
    assert {record["layer"] for record in records if record["n"] == 256} == {"256x256"}
    stored = json.loads(cli("list", "runs", "--json").out)[0]
    assert (stored["status"], stored["results"]) == ("complete", "5/5")


def test_resuming_a_complete_run_measures_nothing(cli, monkeypatch):
    cli(*TINY)
    run = json.loads(cli("list", "runs", "--json").out)[0]["run"]
    monkeypatch.delattr(Meter, "measure")

    ran = cli("run", "smoke", "--resume", run)

    assert ran.code == ExitCode.PASS
    assert "stored 5 results" in ran.out


def test_run_is_not_resumed_as_another_suite(cli):
    cli(*TINY)
    run = json.loads(cli("list", "runs", "--json").out)[0]["run"]

    ran = cli("run", "nightly", "--resume", run)

    assert ran.code == ExitCode.USAGE
    assert "is of suite smoke, not nightly" in ran.error


def test_wrong_kernel_is_regression_and_others_are_measured(cli, monkeypatch):
    from flexq_bench.kernels.cpu.dense import Fp16Gemm

    gemm = Fp16Gemm.gemm

    def wrong(self, x, w, out, **options):
        gemm(self, x, w, out, **options)
        out.add_(1.0)

    monkeypatch.setattr(Fp16Gemm, "gemm", wrong)

    ran = cli(*TINY, "--json", "-")

    records = {r["kernel"]: r for r in map(json.loads, ran.out.splitlines())}
    assert ran.code == ExitCode.REGRESSION
    assert records["cublas-fp16"]["status"] == "incorrect"
    assert not records["cublas-fp16"]["accepted"]
    assert records["cublaslt-w8a8"]["status"] in ("ok", "noisy")
    assert "NO" in ran.err


@pytest.mark.slow
def test_sweep_measures_every_combination_and_its_floors(cli):
    ran = cli(
        "sweep", "--kernels", "cublaslt-w*", "--m", "1,3", "--n", "64", "--k", "96,1", "--json", "-"
    )

    records = [json.loads(line) for line in ran.out.splitlines()]
    assert ran.code == ExitCode.PASS
    assert {record["case"] for record in records} == {
        "empty gemm cold m1n1k1",
        *(f"read-8 gemm cold m1n64k{k}" for k in (1, 96)),
        *(f"cublaslt-w8a8 gemm cold m{m}n64k{k}" for k in (1, 96) for m in (1, 3)),
    }


def test_kernel_missing_on_backend_is_skipped_with_message(cli, tmp_path: Path):
    suite = tmp_path / "own.toml"
    suite.write_text(
        'description = "own"\n[[group]]\nkernels = ["cublas-fp16", "soon-w2a8"]\nm = "1"\n'
        'shapes = ["64x64"]\n'
    )

    ran = cli("run", str(suite), "--backend", "cpu")

    assert ran.code == ExitCode.PASS
    assert "the cpu backend has no soon-w2a8" in ran.err


def test_verbose_logs_each_case(cli):
    ran = cli("-v", *TINY)

    assert "cublas-fp16 gemm hot m4n256k256: " in ran.err
    assert logging.getLogger().level != logging.INFO


def test_sweep_measures_layers_of_configuration(cli, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"} | sizes | heads))
    options = ("--kernels", "cublas-fp16", "--m", "1", "--layers", "qkv_proj,down_proj")

    ran = cli("sweep", "--config", str(tmp_path), *options)

    assert ran.code == ExitCode.PASS
    assert "qkv_proj: 128x64, 3 in the model" in ran.out
    assert "down_proj: 64x96, 3 in the model" in ran.out
    assert "o_proj" not in ran.out


def test_config_and_model_exclude_each_other(cli, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')

    refused = cli("sweep", "--config", str(tmp_path), "--model", "llama-7b")

    assert refused.code == ExitCode.USAGE
    assert "--config brings its own N and K" in refused.error

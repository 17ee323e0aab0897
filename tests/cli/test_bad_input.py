"""Invalid input: one line on stderr, the right exit code, nothing stored."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from flexq_bench.cli.app import main
from flexq_bench.cli.failures import exit_code_of
from flexq_bench.cli.reports import ReportOptions
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import INTERRUPTED, ExitCode

TINY = str(Path(__file__).parents[2] / "examples" / "models" / "tiny-llama")
SHAPE = ("--n", "8", "--k", "8")
RUN = ("run", "smoke", "--kernels", "cublas-fp16")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        # The nearest names come first.
        (("run", "smok"), "no suite 'smok': there are smoke"),
        (("run", "smoke", "--kernels", "flexq-w6a7"), "no kernel 'flexq-w6a7'"),
        (("run", "nightly", "--models", "llama-7"), "no model 'llama-7'"),
        (("run", "smoke", "--device", "cuda:9"), "no device 'cuda:9'"),
        (("run", "smoke", "--m", "3"), "has no M=3: it has 1, 4, 8"),
        (("sweep", "--model", "opt-67b"), "no model 'opt-67b': there are opt-6.7b"),
        (("sweep", *SHAPE, "--kernels", "cublas-w8a8"), "no kernel"),
        (("sweep", *SHAPE, "--stage", "gem"), "no stage 'gem': there are gemm"),
        (("nightly", ""), "no suite ''"),
        (("list", "kernel"), "no list of 'kernel': there are kernels"),
        (("run", "smoke", "--trigger", "nightl"), "no trigger 'nightl'"),
        # An empty name means neither all nor the default.
        (("run", "smoke", "--kernels", ""), "names no"),
        (("list", "kernels", "--all", "--db", ""), "names no"),
        (("run", "smoke", "--models", ","), "names no"),
        (("gate", "static", "--base", "HEAD", "--targets", " "), "names no"),
        (("decode", "llama-7b", "--scheme", ","), "names no"),
        (("init", ""), "names no"),
        (
            ("accuracy", "--model", TINY, "--data", f"{TINY}/heldout.txt", "--tasks", " "),
            "names no",
        ),
        (("run", "smoke", "--cluster", ""), "--cluster names nothing"),
        # Options that are unknown, missing, or exclude each other.
        ((), "which verb?"),
        (("db",), "which verb?"),
        (("no-such-verb",), "no-such-verb"),
        (("run",), "which suite?"),
        (("run", "smoke", "--no-such-option"), "--no-such-option"),
        (("sweep", "--n", "64"), "--k"),
        (("sweep", "--model", "llama-7b", "--n", "64"), "--model"),
        (("run", "smoke", "--json", "records.txt"), "must end in"),
        (("run", "smoke", "--out", "nowhere/records.parquet"), "no folder"),
        (("run", "smoke", "--cluster", "local", "--device", "cpu"), "--device"),
        (("run", "smoke", "--repeat", "3"), "--cluster"),
        (("run", "smoke", "--brief", "--cluster", "local"), "leave --cluster out"),
        (("sweep", *SHAPE, "--gpus", "NVIDIA H200"), "--cluster"),
        (("nightly", "smoke", "--repeat", "2"), "--cluster"),
        (("run", "smoke", "--backend", "cuda", "--device", "cpu"), "drop one"),
        (("run", "smoke", "--m", "4", "--resume", "1234"), "no database at"),
        (("run", "smoke", "--no-tune", "--retune"), "leave one of them out"),
        (("db", "prune"), "prune what?"),
        (("decode", TINY, "--serve", "--batch", "4"), "not with --serve"),
        (("decode", TINY, "--memory-gib", "4"), "only with --serve"),
        (("decode", TINY, "--scheme", "fp16,fp16"), "twice"),
        (("status", "--prometheus", "--json"), "two formats"),
        # Values out of their range.
        (("run", "smoke", "--backend", "tpu"), "tpu"),
        (("list", "runs", "--limit", str(2**63)), "less than or equal"),
        (("compare", "HEAD", "HEAD~1", "--processes", "1000000000"), "less than or equal"),
        (("decode", TINY, "--serve", "--memory-gib", "inf"), "--memory-gib"),
        (("decode", TINY, "--serve", "--memory-gib", "nan"), "--memory-gib"),
        (("decode", TINY, "--serve", "--requests", "999999999"), "--requests"),
        (("decode", TINY, "--prompt", "0"), "0"),
        (("run", "smoke", "--times", "foo=3"), "no time 'foo'"),
        (("run", "smoke", "--times", "start=-1"), "must be above 0"),
        (("run", "smoke", "--times", "start=nan"), "must be above 0"),
        (("run", "smoke", "--times", "start=inf"), "at most 604,800 s"),
        (("worker", "--poll", "nan"), "--poll"),
        (("gate", "static", "--base", "HEAD", "--max-occupancy-loss", "nan"), "less than"),
        (("sweep", *SHAPE, "--m", "0"), "0"),
        (("sweep", *SHAPE, "--m", "-1"), "-1"),
        (("sweep", "--n", "99999999999999", "--k", "8"), "99999999999999"),
        (("sweep", "--n", "8", "--k", "4096.5"), "4096.5"),
        (("sweep", "--n", "many", "--k", "8"), "many"),
        (("sweep", "--n", "", "--k", "8"), "size"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_invalid_arguments_are_usage_errors(cli, database, arguments, says):
    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    assert says in ran.error


def test_invalid_size_file_is_named_without_quoting_secrets(cli, tmp_path):
    secret = "5ec3e7c0ffee" * 5
    (tmp_path / ".env").write_text(f"8\nPOSTGRES_PASSWORD={secret}\n")
    (tmp_path / "key").write_bytes(b"5ec3e7\xff")
    for option, name, says in (
        ("--m", ".env", f"--m @{tmp_path / '.env'}: line 2 "),
        ("--n", ".env", "write 8, 1:8"),
        ("--k", "key", "it is no text"),
    ):
        ran = cli("sweep", *SHAPE, option, f"@{tmp_path / name}")
        assert ran.code == ExitCode.USAGE
        assert says in ran.error
        assert "PASSWORD" not in ran.error
        assert secret[:4] not in ran.error


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_size_file_must_be_regular_and_small(cli, tmp_path):
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(1 << 40)
    for path, says in (
        ("/dev/zero", "no regular file"),
        (pipe, "no regular file"),
        (tmp_path, "no regular file"),
        (large, "larger than 1,048,576 bytes"),
        ("/nowhere/at/all", "no such file"),
        ("a\0b", "no name of a file"),
    ):
        ran = cli("sweep", *SHAPE, "--m", f"@{path}")
        assert ran.code == ExitCode.USAGE
        assert says in ran.error


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (("--n", "1:10000", "--k", "1:10000"), "500,000,000 cases"),
        (("--n", "1:400", "--k", "1:300", "--m", "1"), "120,000 cases"),
        (
            ("--n", "8", "--k", "8", "--m", "1:2000000000"),
            "is out of range: sizes are from 1 to 16,777,216",
        ),
    ],
)
def test_too_many_shapes_are_refused_before_creation(cli, database, shape, says, monkeypatch):
    monkeypatch.setattr("flexq_bench.sweeps.text.Shape", None)

    ran = cli("sweep", *shape, "--kernels", "cublas-fp16")

    assert ran.code == ExitCode.USAGE
    assert says in ran.error
    assert not database.exists()


def test_case_too_large_for_memory_is_usage_error(cli):
    ran = cli("sweep", "--kernels", "cublas-fp16", "--m", "16777216", "--n", "16777216", "--k", "8")

    assert ran.code == ExitCode.USAGE
    assert "would take" in ran.error
    assert "GiB" in ran.error
    assert cli("list", "runs", "--json").out.strip() == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "smoke", "--kernels", "cublas-fp16", "--seed"),
        ("sweep", *SHAPE, "--seed"),
        ("db", "prune", "--older-than"),
        ("detect",),
        ("explain",),
        ("alerts", "acknowledge"),
    ],
    ids=" ".join,
)
def test_number_too_large_for_database_is_usage_error(cli, database, arguments):
    cli("db", "upgrade")

    ran = cli(*arguments, "9" * 20)

    assert ran.code == ExitCode.USAGE
    assert "less than or equal to" in ran.error


def test_full_disk_is_infrastructure_error(cli, measured, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flexq_bench.db.jsonlines.write", full)

    ran = cli("db", "export", str(tmp_path / "r.jsonl"))

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "r.jsonl: No space left on device" in ran.error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk_behind_report_is_infrastructure_error():
    with pytest.raises(UsageError, match="can't write /dev/full: No space left") as raised:
        ReportOptions(markdown="/dev/full").write("text", markdown=str)

    assert exit_code_of(raised.value) == ExitCode.INFRASTRUCTURE


STOP = "import os, signal, time\ndef stop():\n  os.kill(os.getpid(), signal.SIGINT)\n"
RETOLD = (
    "try:\n  stop(); time.sleep(9)\nexcept KeyboardInterrupt:\n  raise ImportError('half of it')\n"
)
FINALIZED = "class Gone:\n  def __del__(self):\n    stop()\nGone()\ntime.sleep(9)\n"


@pytest.mark.parametrize(
    ("module", "does"),
    [
        ("typer", "stop(); time.sleep(9)"),
        pytest.param("torch", RETOLD, marks=pytest.mark.slow),
        ("torch", FINALIZED),
    ],
    ids=["at the start", "told as another error", "in a finalizer"],
)
def test_ctrl_c_during_imports_prints_no_traceback(tmp_path, module, does):
    (tmp_path / f"{module}.py").write_text(STOP + does)
    command = [sys.executable, "-m", "flexq_bench", "run", "smoke", "--backend", "cpu"]
    path = os.pathsep.join([str(tmp_path), *sys.path])

    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (INTERRUPTED, "", "")


def test_unencodable_characters_are_replaced(tmp_path):
    (tmp_path / "µs.csv").write_text("1\n")
    command = [sys.executable, "-m", "flexq_bench.cli", "detect", "--csv", str(tmp_path / "µs.csv")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}

    ran = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert ran.returncode == ExitCode.PASS, ran.stderr
    assert "?s.csv: 1 values" in ran.stdout


def test_closed_stdout_is_accepted(cli, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)

    assert main(["list", "suites"]) == ExitCode.PASS


@pytest.mark.parametrize("content", [b'{"kernel": "flexq-w6a6", "sch', b"", b"a,b,c\n1,2,3\n"])
def test_invalid_results_file_stores_nothing(cli, tmp_path: Path, content):
    file = tmp_path / "results.jsonl"
    file.write_bytes(content)

    ran = cli("db", "import", str(file))

    assert ran.code == ExitCode.USAGE
    assert f"{file}:1:" in ran.error
    assert json.loads(cli("db", "stats", "--json").out)["rows"]["measurement"] == 0


def test_unexpected_error_is_one_line_without_debug(cli, monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("flexq_bench.workloads.suites.list_suites", broken)

    ran = cli("list", "suites")

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "ZeroDivisionError: oops" in ran.error
    assert "--debug" in ran.error
    with pytest.raises(ZeroDivisionError):
        cli("--debug", "list", "suites")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_closed_pipe_has_its_own_exit_code(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)

    ran = listed_models(writing, unbuffered)

    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk_behind_stdout_is_named(unbuffered):
    with Path("/dev/full").open("w") as full:
        ran = listed_models(full, unbuffered)

    assert ran.returncode == ExitCode.INFRASTRUCTURE
    assert ran.stderr.count("\n") == 1
    assert "No space left on device" in ran.stderr


def listed_models(stdout, unbuffered):
    command = [sys.executable, "-m", "flexq_bench.cli", "list", "models", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_unusable_databases_are_refused_before_measuring(cli, database):
    cli("db", "upgrade")
    unknown = cli("run", "--resume", "1234")
    assert (unknown.code, "1234" in unknown.error) == (ExitCode.USAGE, True)
    if os.geteuid() != 0:  # root may write to a file that is read-only
        database.chmod(0o444)
        ran = cli(*RUN)
        assert (ran.code, "read-only" in ran.error) == (ExitCode.INFRASTRUCTURE, True)
        database.chmod(0o644)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_from_the_future'")
    connection.close()
    ran = cli(*RUN)
    assert (ran.code, "upgrade flexq-bench" in ran.error) == (ExitCode.INFRASTRUCTURE, True)

    database.write_text("dear diary, " * 100)
    ran = cli(*RUN)
    assert (ran.code, str(database) in ran.error) == (ExitCode.INFRASTRUCTURE, True)
    assert database.read_text() == "dear diary, " * 100


def overwritten(source: Path, target: Path, *, seed: int, bytes_: int) -> None:
    content = bytearray(source.read_bytes())
    chance = random.Random(seed)
    for _ in range(bytes_):
        content[chance.randrange(100, len(content))] = chance.randrange(256)
    target.write_bytes(content)


@pytest.mark.parametrize("seed", range(4))
def test_overwritten_database_is_reported_as_damaged(cli, measured, tmp_path, seed):
    bad = tmp_path / "bad.sqlite"
    verbs = (("list", "runs"), ("db", "stats"), ("list", "series"), ("status",), ("alerts", "list"))
    for verb in verbs:
        overwritten(measured, bad, seed=seed, bytes_=90 * (seed + 1))
        ran = cli(*verb, "--db", str(bad))

        assert "unexpected" not in ran.err, (verb, ran.err)
        if ran.code != ExitCode.PASS:
            assert ran.code == ExitCode.INFRASTRUCTURE
            assert str(bad) in ran.error


def test_invalid_utf8_is_reported_as_damage(cli, measured):
    with sqlite3.connect(measured) as connection:
        connection.execute("UPDATE run SET suite = CAST(x'ff6e6f' AS TEXT)")
    connection.close()

    ran = cli("list", "runs")

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "is damaged" in ran.error


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a = " + "[" * 100_000 + "]" * 100_000, "not TOML"),
        ("[" + ".".join(["a"] * 50_000) + "]\nx = 1\n", "nested more than 32 deep"),
        (".".join(["a"] * 200_000) + " = 1\n", "nested more than 32 deep"),
        ("# " + "x" * (1 << 21), "larger than 1,048,576 bytes"),
    ],
    ids=["brackets", "tables", "keys", "bytes"],
)
def test_endless_suite_file_is_refused(cli, tmp_path, content, says):
    file = tmp_path / "deep.toml"
    file.write_text(content)

    ran = cli("run", str(file))

    assert ran.code == ExitCode.USAGE
    assert says in ran.error
    assert len(ran.error) < 300


def test_too_many_suite_cases_are_refused_before_creation(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("flexq_bench.workloads.suite._combine", None)
    group = '[[group]]\nkernels = ["cublas-fp16"]\nm = "1:9999"\nshapes = ["8x8", "16x16"]\n'
    file = tmp_path / "bomb.toml"
    file.write_text('description = "many"\n' + group * 300)

    ran = cli("run", str(file))

    assert ran.code == ExitCode.USAGE
    assert "makes 5,999,400 cases, at most 100,000" in ran.error


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere"])
@pytest.mark.parametrize(
    "verb",
    [
        ("gate", "static", "--base", "HEAD"),
        ("decode", TINY, "--scheme", "flexq-w6ax", "--new", "2"),
    ],
    ids=lambda verb: verb[0],
)
def test_unusable_cache_folder_is_named(cli, tmp_path, monkeypatch, verb, place):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / place))

    ran = cli(*verb)

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "set FLEXQ_BENCH_CACHE" in ran.error


def test_unwritable_report_is_refused_before_measuring(cli, tmp_path):
    for options, says in (
        (("--markdown", str(tmp_path)), "is a folder"),
        (("--junit", str(tmp_path / "nowhere" / "report")), "there is no folder"),
        (("--json", "x" * 5000), "no name of a file"),
        (("--junit", "a", "--json", "a"), "--junit and --json name the same place"),
    ):
        ran = cli("gate", "perf", "--base", "HEAD", *options)
        assert ran.code == ExitCode.USAGE
        assert says in ran.error


def test_empty_database_is_usage_error(cli, tmp_path, monkeypatch):
    empty = tmp_path / "new.sqlite"
    empty.touch()
    for verb in (("list", "runs"), ("status",), ("db", "stats")):
        ran = cli(*verb, "--db", str(empty))
        assert ran.code == ExitCode.USAGE
        assert "is an empty file: measure something first" in ran.error
    assert cli("db", "upgrade", "--db", str(empty)).code == ExitCode.PASS
    for name in ("nowhere.sqlite", "\x01\x02", " "):
        monkeypatch.setenv("FLEXQ_BENCH_DB", name)
        assert cli("list", "runs").code == ExitCode.USAGE


@pytest.mark.parametrize(
    "change",
    [
        {"weight_bits": -4},
        {"n_samples": -1},
        {"group": -128},
        {"seed": -1},
        {"protocol_version": -2},
        {"kernel_version": -1},
        {"pct_of_floor": -1.0},
        {"max_rel_error": -1.0},
        {"median_us": 1e300},
    ],
    ids=str,
)
def test_record_value_out_of_range_is_named(cli, measured, tmp_path, change):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    cli("db", "export", str(good))
    first, *rest = good.read_text().splitlines()
    bad.write_text("\n".join([json.dumps(json.loads(first) | change), *rest]) + "\n")
    elsewhere = str(tmp_path / "elsewhere.sqlite")

    ran = cli("db", "import", str(bad), "--db", elsewhere)

    assert ran.code == ExitCode.USAGE
    assert f"{bad}:1: {next(iter(change))} is" in ran.error
    shutil.copy(good, bad)
    assert cli("db", "import", str(bad), "--db", elsewhere).code == ExitCode.PASS

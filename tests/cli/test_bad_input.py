"""Every wrong word: one line on stderr, the right exit code, nothing stored."""

from __future__ import annotations

import errno
import json
import os
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

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
SHAPE = ("--n", "8", "--k", "8")
RUN = ("run", "smoke", "--kernels", "cublas-fp16")


@pytest.mark.parametrize(
    ("arguments", "says", "first"),
    [
        (("run", "smok"), "no suite 'smok'", "smoke"),
        (("run", "smoke", "--kernels", "flexq-w6a7"), "no kernel 'flexq-w6a7'", "flexq-w6a"),
        (("run", "nightly", "--models", "llama-7"), "no model 'llama-7'", "llama-7b"),
        (("run", "smoke", "--device", "cuda:9"), "no device 'cuda:9'", ""),
        (("run", "smoke", "--m", "3"), "has no M=3", "1, 4, 8"),
        (("sweep", "--model", "opt-67b"), "no model 'opt-67b'", "opt-6.7b"),
        (("sweep", *SHAPE, "--kernels", "cublas-w8a8"), "no kernel", "cublaslt-w8a8"),
        (("sweep", *SHAPE, "--stage", "gem"), "no stage 'gem'", "gemm"),
        (("nightly", ""), "no suite ''", ""),
        (("list", "kernel"), "no list of 'kernel'", "kernels"),
        (("run", "smoke", "--trigger", "nightl"), "no trigger 'nightl'", "manual"),
    ],
)
def test_unknown_names_list_the_nearest_first(cli, database, arguments, says, first):
    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    there_are = ran.error.partition(says)[2]
    assert says in ran.error
    names = there_are.replace(" it has ", " are ").partition(" are ")[2]
    assert names.startswith(first)


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "smoke", "--kernels", ""),
        ("list", "kernels", "--all", "--db", ""),
        ("run", "smoke", "--models", ","),
        ("gate", "static", "--base", "HEAD", "--targets", " "),
        ("decode", "llama-7b", "--scheme", ","),
        ("init", ""),
        ("accuracy", "--model", str(TINY), "--data", str(TINY / "heldout.txt"), "--tasks", " "),
    ],
)
def test_an_empty_name_is_not_all_of_them_and_no_default(cli, arguments):
    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    assert "names no" in ran.error


@pytest.mark.parametrize("size", ["0", "-1", "99999999999999", "4096.5", "many", ""])
@pytest.mark.parametrize("dimension", ["--m", "--n", "--k"])
def test_sizes_that_cannot_be_are_refused(cli, database, dimension, size):
    shape = {"--m": "1", "--n": "64", "--k": "64"} | {dimension: size}

    ran = cli("sweep", *(word for pair in shape.items() for word in pair))

    assert ran.code == ExitCode.USAGE
    assert size in ran.error
    assert not database.exists()


SECRET = "5ec3e7c0ffee" * 5


@pytest.mark.parametrize("option", ["--m", "--n", "--k"])
def test_a_file_of_no_sizes_is_named_with_its_line_and_not_quoted(cli, tmp_path, option):
    file = tmp_path / ".env"
    file.write_text(f"8\nPOSTGRES_PASSWORD={SECRET}\n")

    ran = cli("sweep", *SHAPE, option, f"@{file}")

    assert ran.code == ExitCode.USAGE
    assert f"{option} @{file}: line 2 " in ran.error
    assert "write 8, 1:8" in ran.error
    assert "PASSWORD" not in ran.error
    assert SECRET[:4] not in ran.error


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_sizes_come_from_a_regular_file_of_a_bounded_size(cli, tmp_path):
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


def test_binary_sizes_are_not_quoted(cli, tmp_path):
    (tmp_path / "key").write_bytes(b"5ec3e7\xff")

    ran = cli("sweep", *SHAPE, "--m", f"@{tmp_path / 'key'}")

    assert ran.code == ExitCode.USAGE
    assert "it is no text" in ran.error
    assert "5ec3" not in ran.error


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
def test_shapes_are_counted_before_they_are_made(cli, database, shape, says, monkeypatch):
    monkeypatch.setattr("flexq_bench.sweeps.text.Shape", None)

    ran = cli("sweep", *shape, "--kernels", "cublas-fp16")

    assert ran.code == ExitCode.USAGE
    assert says in ran.error
    assert not database.exists()


def test_a_case_too_large_for_the_memory_is_refused_with_what_it_would_take(cli):
    ran = cli("sweep", "--kernels", "cublas-fp16", "--m", "16777216", "--n", "16777216", "--k", "8")

    assert ran.code == ExitCode.USAGE
    assert "would take" in ran.error
    assert "GiB" in ran.error
    assert cli("list", "runs", "--json").out.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run",), "which suite?"),
        (("run", "smoke", "--backend", "tpu"), "tpu"),
        (("run", "smoke", "--no-such-option"), "--no-such-option"),
        (("no-such-verb",), "no-such-verb"),
        (("sweep", "--n", "64"), "--k"),
        (("sweep", "--model", "llama-7b", "--n", "64"), "--model"),
        (("run", "smoke", "--json", "records.txt"), "must end in"),
        (("run", "smoke", "--out", "nowhere/records.parquet"), "no folder"),
        (("run", "smoke", "--cluster", "local", "--device", "cpu"), "--device"),
        (("run", "smoke", "--repeat", "3"), "--cluster"),
        (("sweep", *SHAPE, "--gpus", "NVIDIA H200"), "--cluster"),
        (("nightly", "smoke", "--repeat", "2"), "--cluster"),
        (("run", "smoke", "--backend", "cuda", "--device", "cpu"), "drop one"),
        (("run", "smoke", "--m", "4", "--resume", "1234"), "leave out"),
        (("db", "prune"), "prune what?"),
    ],
)
def test_options_that_do_not_fit_are_wrong_usage(cli, arguments, says):
    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    assert says in ran.error


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
def test_a_number_that_no_database_holds_is_wrong_usage(cli, database, arguments):
    cli("db", "upgrade")

    ran = cli(*arguments, "9" * 20)

    assert ran.code == ExitCode.USAGE
    assert "less than or equal to" in ran.error


def test_a_full_disk_is_no_wrong_usage(cli, measured, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flexq_bench.db.jsonlines.write", full)

    ran = cli("db", "export", str(tmp_path / "r.jsonl"))

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "r.jsonl: No space left on device" in ran.error


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_report_that_a_full_disk_does_not_take_is_no_wrong_usage():
    with pytest.raises(UsageError, match="can't write /dev/full: No space left") as raised:
        ReportOptions(markdown="/dev/full").write("text", markdown=str)

    assert exit_code_of(raised.value) == ExitCode.INFRASTRUCTURE


@pytest.mark.parametrize("verb", [(), ("db",), ("alerts",)], ids=str)
def test_no_verb_at_all_is_wrong_usage_with_a_word(cli, verb):
    ran = cli(*verb)

    assert ran.code == ExitCode.USAGE
    assert "which verb?" in ran.error


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_regression(unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "flexq_bench.cli", "list", "models", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}

    ran = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment
    )

    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


STOP = "import os, signal, time\ndef stop():\n  os.kill(os.getpid(), signal.SIGINT)\n"
RETOLD = (
    "try:\n  stop(); time.sleep(9)\nexcept KeyboardInterrupt:\n  raise ImportError('half of it')\n"
)
FINALIZED = "class Gone:\n  def __del__(self):\n    stop()\nGone()\ntime.sleep(9)\n"


@pytest.mark.parametrize(
    ("module", "does"),
    [("typer", "stop(); time.sleep(9)"), ("torch", RETOLD), ("torch", FINALIZED)],
    ids=["at the start", "told as another error", "in a finalizer"],
)
def test_ctrl_c_while_it_is_imported_is_no_traceback(tmp_path, module, does):
    (tmp_path / f"{module}.py").write_text(STOP + does)
    command = [sys.executable, "-m", "flexq_bench", "run", "smoke", "--backend", "cpu"]
    path = os.pathsep.join([str(tmp_path), *sys.path])

    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (INTERRUPTED, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_named(unbuffered):
    command = [sys.executable, "-m", "flexq_bench.cli", "list", "suites"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}

    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )

    assert ran.returncode == ExitCode.INFRASTRUCTURE
    assert ran.stderr.count("\n") == 1
    assert "No space left on device" in ran.stderr


def test_a_terminal_without_our_signs_shows_others(tmp_path):
    (tmp_path / "µs.csv").write_text("1\n")
    command = [sys.executable, "-m", "flexq_bench.cli", "detect", "--csv", str(tmp_path / "µs.csv")]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}

    ran = subprocess.run(command, capture_output=True, text=True, env=environment)

    assert ran.returncode == ExitCode.PASS, ran.stderr
    assert "?s.csv: 1 values" in ran.stdout


def test_without_a_stdout_it_still_works(cli, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)

    assert main(["list", "suites"]) == ExitCode.PASS


def test_resuming_an_unknown_run_is_wrong_usage(cli):
    cli("db", "upgrade")

    ran = cli("run", "--resume", "1234")

    assert ran.code == ExitCode.USAGE
    assert "1234" in ran.error


def test_a_database_that_is_not_one_is_named_and_left_alone(cli, database):
    database.parent.mkdir()
    database.write_text("dear diary, " * 100)

    ran = cli(*RUN)

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert str(database) in ran.error
    assert database.read_text() == "dear diary, " * 100


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to a file that is read-only")
def test_a_read_only_database_is_refused_before_measuring(cli, database):
    cli("db", "upgrade")
    database.chmod(0o444)

    ran = cli(*RUN)

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "read-only" in ran.error


def test_a_newer_database_is_refused(cli, database):
    cli("db", "upgrade")
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_from_the_future'")
    connection.close()

    ran = cli(*RUN)

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "newer" in ran.error or "later" in ran.error


@pytest.mark.parametrize("content", [b'{"kernel": "flexq-w6a6", "sch', b"", b"a,b,c\n1,2,3\n"])
def test_a_results_file_that_is_no_such_file_stores_nothing(cli, tmp_path: Path, content):
    file = tmp_path / "results.jsonl"
    file.write_bytes(content)

    ran = cli("db", "import", str(file))

    assert ran.code == ExitCode.USAGE
    assert f"{file}:1:" in ran.error
    assert json.loads(cli("db", "stats", "--json").out)["rows"]["measurement"] == 0


def test_an_unexpected_error_is_one_line_unless_debug_asks_for_the_traceback(cli, monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("flexq_bench.workloads.suites.list_suites", broken)

    ran = cli("list", "suites")

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "ZeroDivisionError: oops" in ran.error
    assert "--debug" in ran.error
    with pytest.raises(ZeroDivisionError):
        cli("--debug", "list", "suites")

"""Values that parse and can't be: refused in one line before anything is measured or read whole."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from flexq_bench.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "examples" / "models" / "tiny-llama")


def overwritten(source: Path, target: Path, *, seed: int, bytes_: int) -> None:
    content = bytearray(source.read_bytes())
    chance = random.Random(seed)
    for _ in range(bytes_):
        content[chance.randrange(100, len(content))] = chance.randrange(256)
    target.write_bytes(content)


@pytest.mark.parametrize("seed", range(12))
def test_a_database_with_bytes_overwritten_is_called_damaged(cli, measured, tmp_path, seed):
    bad = tmp_path / "bad.sqlite"
    verbs = (("list", "runs"), ("db", "stats"), ("list", "series"), ("status",), ("alerts", "list"))
    for verb in verbs:
        overwritten(measured, bad, seed=seed, bytes_=30 * (seed + 1))
        ran = cli(*verb, "--db", str(bad))

        assert "unexpected" not in ran.err, (verb, ran.err)
        if ran.code != ExitCode.PASS:
            assert ran.code == ExitCode.INFRASTRUCTURE
            assert str(bad) in ran.error


def test_text_that_is_no_utf8_is_called_damaged(cli, measured):
    with sqlite3.connect(measured) as connection:
        connection.execute("UPDATE run SET suite = CAST(x'ff6e6f' AS TEXT)")
    connection.close()

    ran = cli("list", "runs")

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "is damaged" in ran.error


def test_an_empty_file_is_a_database_to_set_up(cli, tmp_path):
    empty = tmp_path / "new.sqlite"
    empty.touch()
    for verb in (("list", "runs"), ("status",), ("db", "stats")):
        ran = cli(*verb, "--db", str(empty))
        assert ran.code == ExitCode.USAGE
        assert "is an empty file: measure something first" in ran.error

    assert cli("db", "upgrade", "--db", str(empty)).code == ExitCode.PASS


@pytest.mark.parametrize("name", ["nowhere.sqlite", "\x01\x02", " "])
def test_a_variable_that_names_no_database_is_no_empty_list(cli, monkeypatch, name):
    monkeypatch.setenv("FLEXQ_BENCH_DB", name)

    assert cli("list", "runs").code == ExitCode.USAGE


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
def test_a_suite_without_end_is_refused_at_once(cli, tmp_path, content, says):
    file = tmp_path / "deep.toml"
    file.write_text(content)

    ran = cli("run", str(file))

    assert ran.code == ExitCode.USAGE
    assert says in ran.error
    assert len(ran.error) < 300


def test_a_suite_of_many_groups_is_counted_before_it_is_made(cli, tmp_path, monkeypatch):
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
def test_a_cache_folder_that_cannot_be_is_named(cli, tmp_path, monkeypatch, verb, place):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / place))

    ran = cli(*verb)

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert "set FLEXQ_BENCH_CACHE" in ran.error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("list", "runs", "--limit", str(2**63)), "less than or equal"),
        (("compare", "HEAD", "HEAD~1", "--processes", "1000000000"), "less than or equal"),
        (("decode", TINY, "--serve", "--memory-gib", "inf"), "--memory-gib"),
        (("decode", TINY, "--serve", "--memory-gib", "nan"), "--memory-gib"),
        (("decode", TINY, "--serve", "--requests", "999999999"), "--requests"),
        (("decode", TINY, "--serve", "--batch", "4"), "not with --serve"),
        (("decode", TINY, "--memory-gib", "4"), "only with --serve"),
        (("decode", TINY, "--scheme", "fp16,fp16"), "twice"),
        (("run", "smoke", "--times", "foo=3"), "no time 'foo'"),
        (("run", "smoke", "--times", "start=-1"), "must be above 0"),
        (("run", "smoke", "--times", "start=nan"), "must be above 0"),
        (("run", "smoke", "--times", "start=inf"), "at most 604,800 s"),
        (("run", "smoke", "--cluster", ""), "--cluster names nothing"),
        (("status", "--prometheus", "--json"), "two formats"),
        (("worker", "--poll", "nan"), "--poll"),
        (("gate", "static", "--base", "HEAD", "--max-occupancy-loss", "nan"), "less than"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else "",
)
def test_numbers_and_options_that_cannot_be_are_wrong_usage(cli, arguments, says):
    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    assert says in ran.error


@pytest.mark.parametrize("option", ["--markdown", "--junit", "--json"])
def test_a_report_that_cannot_be_written_is_said_before_measuring(cli, tmp_path, option):
    for path, says in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "nowhere" / "report"), "there is no folder"),
        ("x" * 5000, "no name of a file"),
    ):
        ran = cli("gate", "perf", "--base", "HEAD", option, path)
        assert ran.code == ExitCode.USAGE
        assert says in ran.error


def test_two_reports_of_one_name_are_refused(cli):
    ran = cli("gate", "perf", "--base", "HEAD", "--junit", "report", "--json", "report")

    assert ran.code == ExitCode.USAGE
    assert "--junit and --json name the same place" in ran.error


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff", "us\n"])
def test_a_csv_without_a_number_is_wrong_usage(cli, tmp_path, content):
    file = tmp_path / "empty.csv"
    file.write_text(content)

    ran = cli("detect", "--csv", str(file))

    assert ran.code == ExitCode.USAGE
    assert "holds no number" in ran.error


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
def test_records_of_numbers_that_cannot_be_are_refused_by_name(cli, measured, tmp_path, change):
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

"""`status`, `worker`, sweeps that are queued or like a run, and JSON log lines."""

from __future__ import annotations

import json
import logging
import platform
from datetime import UTC, datetime

import pytest

from flexq_bench.cli.app import main
from flexq_bench.cli.measuring import RunOptions, report
from flexq_bench.db.engine import open_database
from flexq_bench.db.fleet import (
    Beat,
    JobInfo,
    WorkerInfo,
    add_jobs,
    beat,
    drain,
    register_worker,
)
from flexq_bench.db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.db.store import begin_run
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode
from flexq_bench.fleet import parse_times
from flexq_bench.logs import JsonFormatter

CASE = "flexq-w6a6 gemm cold m1n64k64"
SHAPE = ("--n", "32", "--k", "32", "--m", "1", "--backend", "cpu")


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "flexq.sqlite")


@pytest.fixture
def fleet(path):
    """A database in which one worker measures one of two jobs."""
    now = datetime.now(UTC)
    run = RunInfo("r" * 36, 'a "suite"', "nightly", "running", now.isoformat(), "key", (CASE,))
    with open_database(path) as database, database.session() as session:
        begin_run(session, run, CommitInfo("a" * 40, None, 1, dirty=False))
        add_jobs(session, run.uuid, [JobInfo(CASE, expected_s=3.0), JobInfo(CASE, 2, 3.0)])
        device = DeviceInfo("GPU-1", "NVIDIA H200", "cuda")
        register_worker(session, WorkerInfo("w1", "node7", 1, device, {}), at=now)
        beat(session, [Beat("w1", CASE, 55.0, 4, 9.0)], until=now, at=now)
    return path


def test_status_shows_progress(fleet, capsys):
    assert main(["status", "--db", fleet]) == 0

    output = capsys.readouterr().out
    assert "run rrrrrrrr" in output
    assert "2 queued, about 6 GPU seconds remaining" in output
    assert f"on node7, NVIDIA H200: {CASE}, 4 done, 55 °C" in output


def test_status_in_json_and_as_metrics(fleet, capsys):
    assert main(["status", "--json", "--db", fleet]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["runs"][0]["open"], status["workers"][0]["finished"]) == (2, 4)

    assert main(["status", "--prometheus", "--db", fleet]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f'flexq_jobs{{run="{"r" * 36}",suite="a \\"suite\\"",state="queued"}} 2' in lines
    assert 'flexq_workers{gpu="NVIDIA H200",state="measuring"} 1' in lines
    assert "# TYPE flexq_requests gauge" in lines


def test_report_names_reason_of_missing_device(path, capsys):
    run = RunInfo("r" * 36, "made", "manual", "complete", "2026-01-01T00:00:00Z", "key", (CASE,))
    with open_database(path) as database:
        with database.session() as session:
            begin_run(session, run, CommitInfo("a" * 40, None, 1, dirty=False))
            add_jobs(session, run.uuid, [JobInfo(CASE, reason="it takes 2,180 GiB")])

        assert report(database, run, RunOptions(path)) == ExitCode.MISSING

    assert "no-device: 1 × it takes 2,180 GiB" in capsys.readouterr().out


OF_NORM = ("--operation", "norm_quantize", "--parameter", "tokens=1", "--parameter", "hidden=256")


@pytest.mark.parametrize("chosen", [("cublas-fp16", *SHAPE), ("decoder-norm", *OF_NORM)])
def test_worker_measures_queued_sweep(path, capsys, chosen):
    command = ("sweep", "--kernels", *chosen, "--queue", "--db", path, "--backend", "cpu")
    assert main(command) == 0
    assert "queued request" in capsys.readouterr().out

    assert main(["worker", "--once", "--backend", "cpu", "--db", path]) == 0

    assert "done, run" in capsys.readouterr().out


def test_queued_sweep_is_cancelled(path, capsys):
    assert main(["sweep", "--kernels", "cublas-fp16", *SHAPE, "--queue", "--db", path]) == 0
    capsys.readouterr()
    main(["status", "--json", "--db", path])
    (request,) = json.loads(capsys.readouterr().out)["requests"]

    assert main(["status", "--cancel", request["uuid"][:8], "--db", path]) == 0
    assert capsys.readouterr().out.strip() == "nothing runs and nothing waits"
    assert main(["status", "--cancel", request["uuid"][:8], "--db", path]) == ExitCode.USAGE
    assert "is cancelled already" in capsys.readouterr().err


def test_queued_sweep_may_request_gpu_of_another_machine(path, capsys):
    command = ("sweep", "--kernels", "cublas-fp16", *SHAPE, "--queue", "--gpus", "NVIDIA H200")

    assert main([*command, "--db", path]) == 0

    assert "queued request" in capsys.readouterr().out


def test_worker_exits_when_its_sources_change(path, capsys, monkeypatch):
    hashes = iter(["before", "after"])
    monkeypatch.setattr("flexq_bench.cli.worker.source_hash", lambda root: next(hashes))

    assert main(["worker", "--backend", "cpu", "--db", path]) == 0

    assert "start it again" in capsys.readouterr().out


def test_sweep_like_run_prints_expected_time_and_plots(path, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    assert main(["sweep", "--kernels", "cublas-fp16", *SHAPE, "--db", path]) == 0
    run = capsys.readouterr().out.split("results of run ")[1][:8]
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("1\n2, 2\n")

    like = ("sweep", "--like", run, "--m", f"@{sizes}", "--backend", "cpu", "--db", path)
    assert main([*like, "--plot", str(plot)]) == 0

    output = capsys.readouterr().out
    assert "4 cases on 1 × " in output
    assert ": about " in output
    assert "results?run=" in output
    assert plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sweep", "--like", "x", "--n", "3"), "drop --n"),
        (("sweep", "--m", "@/nowhere", "--n", "3", "--k", "3"), "can't be read"),
        (("nightly", "--report", "/dev/null/reports"), "can't be created"),
    ],
)
def test_contradicting_options_are_usage_errors(arguments, message, path, capsys):
    assert main([*arguments, "--db", path]) == 2
    assert message in capsys.readouterr().err


def test_invalid_times_are_usage_errors():
    assert parse_times("lease=20,beat=5").lease == 20
    for text, message in (
        ("leese=3", "no time 'leese'"),
        ("lease=x", "write lease=SECONDS"),
        ("case=0", "must be above 0"),
        ("lease=5", "two beats"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_times(text)


def test_json_log_line_has_run_and_job():
    record = logging.LogRecord("flexq_bench", logging.INFO, "", 0, "%d left", (3,), None)
    record.run, record.job, record.worker = "r1", 7, None

    line = json.loads(JsonFormatter().format(record))

    assert (line["message"], line["level"]) == ("3 left", "info")
    assert (line["run"], line["job"]) == ("r1", 7)
    assert "worker" not in line


def test_drained_device_is_listed_and_resumed(fleet, capsys):
    assert main(["fleet", "drain", "node7", "--reason", "new power supply", "--db", fleet]) == 0
    assert main(["fleet", "list", "--json", "--db", fleet]) == 0
    listed = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert [(row["target"], row["reason"]) for row in listed] == [("node7", "new power supply")]

    assert main(["fleet", "resume", "node7", "--db", fleet]) == 0
    assert main(["fleet", "list", "--db", fleet]) == 0
    assert "nothing is drained" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [("drain", "node8", "--reason", "x"), ("drain", "node7", "--reason", " "), ("resume", "node7")],
)
def test_drain_of_unknown_nodes_or_without_reason_is_refused(fleet, command):
    assert main(["fleet", *command, "--db", fleet]) == ExitCode.USAGE


def test_drained_host_measures_nothing_without_cluster(path, capsys, monkeypatch):
    sweep = ["sweep", "--kernels", "cublas-fp16", *SHAPE, "--db", path]
    assert main([*sweep]) == 0
    with open_database(path) as database, database.session() as session:
        drain(session, platform.node(), reason="hot", person="Ada", at=datetime.now(UTC))

    assert main([*sweep]) == ExitCode.INFRASTRUCTURE

    assert "is drained (hot): flexq-bench fleet resume" in capsys.readouterr().err

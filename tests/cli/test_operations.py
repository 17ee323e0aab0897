"""Cases of any operation, from the command line to the database."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.repository.provenance import current_commit

KERNELS = """
from flexq_bench.api import kernel


@kernel("norm_quantize", "norm", backends=["cpu"])
def norm(x, gamma, y):
    x = x.float()
    y.copy_(x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma.float())
"""
SUITE = """
description = "norms"
[[cases]]
operation = "norm_quantize"
kernels = ["mine.*"]
parameters = {tokens = "1,4", hidden = 2048}
caches = ["hot"]
[[group]]
kernels = ["*norm"]
m = "1"
shapes = ["32x32"]
"""
SHAPE = "tokens=%d hidden=2048 norm=rms residual=none"


@pytest.fixture
def norms(cli, tmp_path, monkeypatch):
    """Runs a command with kernels of norms, at a clean commit."""
    clean = replace(current_commit(), dirty=False)
    monkeypatch.setattr("flexq_bench.cli.measuring.current_commit", lambda: clean)
    kernels = tmp_path / "mine.py"
    kernels.write_text(KERNELS)

    def run(*arguments):
        return cli(*arguments, "--kernels-from", str(kernels), "--backend", "cpu")

    return run


def parameters_of(ran):
    records = map(json.loads, ran.out.splitlines())
    return [one["parameters"] for one in records if one.get("operation")]


def test_operation_is_measured_and_stored(norms, database, tmp_path):
    suite = tmp_path / "norms.toml"
    suite.write_text(SUITE)

    ran = norms("run", str(suite), "--parameter", "tokens=4:", "--json", "-")
    swept = norms(
        *("sweep", "--operation", "norm_quantize", "--parameter", "tokens=1,4"),
        *("--parameter", "hidden=2048", "--cache", "hot", "--json", "-"),
    )

    assert (ran.code, swept.code) == (0, 0), ran.err + swept.err
    assert parameters_of(ran) == [SHAPE % 4]  # and no linear layer of a kernel of norms
    assert parameters_of(swept) == [SHAPE % 1, SHAPE % 4]
    with open_database(str(database)) as opened, opened.session() as session:
        [row] = queries.run_results(session, json.loads(ran.out.splitlines()[-1])["run"])[-1:]
        assert (row.operation, row.m, row.kernel) == ("norm_quantize", None, "mine.norm")


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--parameter", "tokens=1"),
        ("sweep", "--operation", "norm_quantise"),
        ("sweep", "--operation", "norm_quantize", "--m", "1"),
        ("sweep", "--operation", "norm_quantize", "--parameter", "tokens"),
        ("sweep", "--operation", "norm_quantize", "--parameter", "tokens=1"),
        ("sweep", "--operation", "norm_quantize", "--parameter", "tokens=1,hidden=8"),
        ("run", "smoke", "--operation", "norm_quantize"),
        ("run", "smoke", "--parameter", "heads=1"),
    ],
)
def test_impossible_selection_of_an_operation_is_refused(cli, arguments):
    ran = cli(*arguments)

    assert ran.code == 2
    assert ran.error


def test_operations_are_listed(cli):
    ran = cli("list", "operations", "--json")

    listed = {row["operation"]: row for row in json.loads(ran.out)}
    assert listed["linear"]["axes"] == ["m"]
    assert "context" in listed["attention_decode"]["parameters"]
    assert list(listed["norm_quantize"]["inputs"]) == ["x", "residual", "gamma"]
    assert listed["norm_quantize"]["outputs"]["y"] == "activation [tokens, hidden]"


def test_trace_is_swept_and_weighted_by_its_counts(cli, tmp_path):
    call = {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "pid": 1, "tid": 1, "dur": 4.0}
    calls = [
        {**call, "ts": 10.0 * i, "args": {"Input Dims": [[tokens, 256], [128, 256], []]}}
        for i, tokens in enumerate([1, 1, 1, 4])
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": calls}))

    ran = cli(
        *("sweep", "--from-trace", str(trace), "--kernels", "fp16", "--json", "-"),
        *("--backend", "cpu"),
    )

    assert ran.code == 0, ran.err
    records = list(map(json.loads, ran.out.splitlines()))
    medians = {one["m"]: one["median_us"] for one in records if one["kernel"] == "fp16"}
    assert set(medians) == {1, 4}
    assert f"{3 * medians[1] + medians[4]:.5g}" in ran.err
    assert "2 of 2" in ran.err
    assert "16" in ran.err  # traced us
    (run,) = re.findall(r"of run (\w{8})", ran.err)
    assert f"{3 * medians[1] + medians[4]:.5g}" in cli("run", "--resume", run).out


@pytest.mark.parametrize("other", [("--m", "1"), ("--like", "3f2a"), ("--queue",)])
def test_trace_with_shapes_of_another_option_is_refused(cli, other, tmp_path):
    assert cli("sweep", "--from-trace", str(tmp_path), *other).code == 2

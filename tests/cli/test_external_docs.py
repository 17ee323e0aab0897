"""The commands of docs/external-results.md, run one after the other with files as it describes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

pytest.importorskip("requests")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "external-results.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    for line in block.splitlines()
    if line.startswith("flexq-bench ")
]
# A night is late, and no receiver of the page's subscriptions is set here.
CODES = {"notify": (4, 5)}


def block(kind):
    (text,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S)
    return text


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The files that the page names, in the folder that commands run in."""
    monkeypatch.chdir(tmp_path)
    for name in ("FLEXQ_BENCH_SLACK_URL", "FLEXQ_BENCH_HOOK_URL"):
        monkeypatch.delenv(name, raising=False)
    mean = {"tag": "nv/cold/time/gpu/mean", "data": [{"name": "value", "value": "2e-5"}]}
    state = {"name": "Device=0", "device": 0, "axis_values": None, "summaries": [mean]}
    device = {"id": 0, "name": "NVIDIA H200"}
    nvbench = {"devices": [device], "benchmarks": [{"name": "gemm", "states": [state]}]}
    Path("nvbench.json").write_text(json.dumps(nvbench))
    shutil.copy(ROOT / "tests/exchange/external/files/data.js", "data.js")
    Path("history.csv").write_text(block("csv"))
    Path("subscriptions.toml").write_text(block("toml"))
    shape = {"A": {"shape": ["M", "K"]}, "B": {"shape": ["N", "K"]}}
    axes = {"M": {"type": "var"}, "N": {"type": "const", "value": 64}}
    definition = {
        "name": "gemm",
        "op_type": "gemm",
        "axes": axes | {"K": {"type": "const", "value": 64}},
        "inputs": shape,
        "outputs": {"C": {"shape": ["M", "N"]}},
    }
    evaluation = {
        "status": "PASSED",
        "environment": {"hardware": "NVIDIA_H200"},
        "performance": {"latency_ms": 0.5},
    }
    trace = {"definition": "gemm", "workload": {"axes": {"M": 1}}, "solution": "theirs"}
    for kind, content in (
        ("definitions/gemm.json", definition),
        ("workloads/gemm.jsonl", trace),
        ("traces/gemm.jsonl", trace | {"evaluation": evaluation}),
    ):
        path = Path("traces") / kind
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))


def test_every_command_of_page_runs(cli, files):
    assert cli("db", "import", str(ROOT / "examples/h100/papers-kernels.jsonl.gz")).code == 0
    ran = {}
    for line in COMMANDS:
        verb, *arguments = shlex.split(line)[1:]
        if "notify --late" in line:
            arguments = ["00:00" if word == "06:30" else word for word in arguments]
        ran[line] = cli(verb, *arguments)

    wrong = {
        line: (result.code, result.err)
        for line, result in ran.items()
        if result.code not in CODES.get(line.split()[1], (0,))
        and not (
            line == "flexq-bench notify --subscriptions subscriptions.toml" and not result.code
        )
    }
    assert wrong == {}
    assert len(ran) == 12
    assert json.loads(Path("bmf.json").read_text())
    assert Path("theirs.toml").read_text().count("[[group]]") == 1


def test_subscriptions_of_page_load(files):
    from flexq_bench.ci.notifications.subscriptions import load_subscriptions

    assert [entry.name for entry in load_subscriptions("subscriptions.toml").entries] == [
        "flexq-team",
        "hook",
    ]

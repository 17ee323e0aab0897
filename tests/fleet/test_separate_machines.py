"""A project on a cluster whose nodes have no file in common with the coordinator."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from separate_machines import Machines, can_separate, machines

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "byo" / "make_repository.py"
LONGEST_S = 1500  # of a command on a busy machine
# Computing takes as long as others let it; sleeping 8 ms, and 32 of the slower commit, they don't.
SLEEP = "time.sleep(0.008 * (1 + PADDING_PERCENT / 100))"
WRITTEN = "    out.copy_("

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_separate(), reason="needs namespaces of its own"),
]


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory, load_module: Callable[[Path], Any]) -> Path:
    """The sample repository with kernels that sleep; its last commit's build notes the host."""
    folder = tmp_path_factory.mktemp("project") / "acme"
    script = load_module(SCRIPT)
    script.SAMPLE = shutil.copytree(script.SAMPLE, folder.with_name("sample"))
    kernels = script.SAMPLE / "kernels" / "torch_kernels.py"
    computed = kernels.read_text().replace("import torch\n", "import time\n\nimport torch\n", 1)
    kernels.write_text(computed.replace(WRITTEN, f"    {SLEEP}\n{WRITTEN}"))
    script.make(folder, ("torch",), (300, 30), "256x256")
    project = folder / "flexq-bench.toml"
    project.write_text(project.read_text().replace("sh build.sh", "hostname > built_on.txt"))
    script.git(folder, 59, "commit", "--quiet", "--all", "--message", "note the host")
    return folder


@pytest.fixture(scope="module")
def nodes(acme: Path) -> Iterator[Machines]:
    hidden = [acme, *(ROOT / name for name in ("flexq_bench", "kernels", "workloads", "db"))]
    # Ray's sockets lie below, and their paths may have 107 characters only.
    with tempfile.TemporaryDirectory(dir="/tmp") as short, machines(Path(short), hidden) as made:
        made.add("alpha", "Alpha CPU")
        made.add("beta", "Beta CPU")
        made.wait_for_nodes()
        yield made


@pytest.fixture
def flexq(nodes: Machines, acme: Path, tmp_path: Path) -> Callable[..., Any]:
    """flexq("nightly", ...): the JSON that a command on the project and the cluster prints."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("RAY_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": path, "FLEXQ_BENCH_CACHE": str(tmp_path / "cache")}
    place = ("--cluster", nodes.address, "--backend", "cpu", "--times", "scan=1")

    def run(*command: str, code: int) -> Any:
        done = subprocess.run(
            (
                *(sys.executable, "-m", "flexq_bench.cli", *command, "--project", str(acme)),
                *(*place, "--db", str(tmp_path / "flexq.sqlite")),
            ),
            env={**inherited, **variables},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        logs = nodes.folder.glob("head/tmp/ray/session_*/logs/ray_client_server*.err")
        assert done.returncode == code, done.stderr + "".join(log.read_text() for log in logs)
        return json.loads(done.stdout)

    return run


def test_commit_is_measured_on_two_kinds_and_built_once(flexq, nodes):
    reports = flexq("nightly", "--canaries", "0", "--json", code=0)

    assert sorted(report["gpu"] for report in reports) == ["Alpha CPU", "Beta CPU"]
    assert [report["outcome"] for report in reports] == ["complete"] * 2
    homes = [nodes.folder / name / "cache" for name in ("alpha", "beta")]
    built_on = [list(home.glob("projects/acme/*/tree/built_on.txt")) for home in homes]
    assert [len(found) for found in built_on] == [1, 1]
    assert len({found[0].read_text() for found in built_on}) == 1


def test_gate_finds_the_slower_commit(flexq):
    ends = ("--base", "slower~1", "--head", "slower")

    document = flexq(
        *("gate", "perf", *ends, "--gpus", "Alpha*", "--processes", "1", "--json", "-"), code=1
    )

    assert {case["outcome"] for case in document["cases"]} == {"regression"}
    assert document["gpu"] == "Alpha CPU"


def test_bisection_names_the_slower_commit(flexq, acme):
    ends = ("--good", "slower~3", "--bad", "fast-again~1")
    case = "acme.torch-w6a8 gemm cold m16n256k256"

    document = flexq("bisect", case, *ends, "--gpus", "Beta*", "--processes", "1", "--json", code=1)

    slower = subprocess.check_output(("git", "-C", str(acme), "rev-parse", "slower"), text=True)
    assert document["suspects"] == [slower.strip()]

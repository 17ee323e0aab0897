"""Every command of the README and the first pages is run, on what this machine has."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md")))
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = re.findall(r"^```sh\n(.*?)^```", TEXT, re.M | re.S)
(KERNEL_FILE,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [
    line.partition(" #")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("flexq-bench ")
]
FEW = "--kernels cublas-fp16 --m 1"
# What a command is given besides, so that it takes seconds on a CPU; of an option that is given
# twice the last one counts. The beginnings of commands.
NARROWED = {
    "sweep --m 1": "--m 1 --n 64 --k 64",  # not --model
    "sweep --model": f"{FEW} --layers o_proj",
    "sweep --like": "--kernels cublas-fp16",
    "sweep --kernels-from": "--n 64 --k 64",
    "sweep --from-trace": "--kernels cublas-fp16",
    "nightly": "smoke --cluster none --canaries 0 --backfill 0",
    "compare HEAD .": f"{FEW} --processes 1",
    "compare cublaslt-w8a8": "--m 1 --processes 1",
    "bisect": "--processes 1",
    "gate perf --project": "--processes 1",
    "accuracy": "--max-tokens 512",
    "demo": "--help",
    "tour": "--help",  # it takes minutes
    "dashboard": "--help",  # it would run until somebody ends it
    "serve-api": "--help",  # so would this
}
# Names that stand for what only the reader has.
STANDS_FOR = {"main~5": "HEAD~1", "origin/main": "HEAD~1", "v1.0.0": "HEAD~1", "main": "HEAD"}
OF_THE_PROJECT = {"my_kernels.py": "my_kernels.py", "PATH": "."}
SMALL_SUITE = """description = "one shape"
[[group]]
kernels = ["cublas-fp16"]
m = "1"
shapes = ["64x64"]
caches = ["hot"]
"""
QUICK_POLICY = """version = 1
suite = "small.toml"
slower_percent = 2
"""
NVBENCH = {
    "devices": [{"id": 0, "name": "NVIDIA H200"}],
    "benchmarks": [
        {
            "name": "gemm",
            "states": [
                {
                    "device": 0,
                    "axis_values": [],
                    "is_skipped": False,
                    "summaries": [
                        {
                            "tag": "nv/cold/time/gpu/mean",
                            "data": [{"name": "value", "value": "2e-5"}],
                        }
                    ],
                }
            ],
        }
    ],
}
# As torch.profiler writes it: one linear layer [1, 64] x [96, 64]^T.
LINEAR = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::linear",
    "pid": 1,
    "tid": 1,
    "ts": 0,
    "dur": 9,
    "args": {"Input Dims": [[1, 64], [96, 64]], "Concrete Inputs": []},
}
FILES = {  # that commands read, in the folder where they are given
    "gemm.json": json.dumps(NVBENCH).encode(),
    "trace.json.gz": gzip.compress(json.dumps({"traceEvents": [LINEAR]}).encode()),
}
WRITTEN = ("report.md", "times.png", "flexq.prom")
MAY_END_WITH = {
    "compare": {0, 1, 3},
    "bisect": {0, 1, 2, 3},  # 2: nothing between the two changes the code
    "gate": {0, 1, 3, 4},
    "notify": {2},  # no file of subscriptions is here
    "explain": {0, 2},  # 2: no alert is open here
    "nightly": {0, 1, 3},
    "doctor": {0, 5},
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with a commit on top, where commands are given as a reader would."""
    folder = tmp_path_factory.mktemp("readme")
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "tree")], check=True)
    tree = folder / "tree"
    source = tree / "kernels" / "registry.py"
    source.write_text(source.read_text() + "# changed\n")
    commit(tree, "Change nothing")
    project = folder / "project"
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)
    (project / "my_kernels.py").write_text(KERNEL_FILE)
    commit(project, "Add a kernel")
    for name, content in FILES.items():
        (tree / name).write_bytes(content)
    # Outside of the tree: in it a gate reads what base has.
    (folder / "quick.toml").write_text(QUICK_POLICY)
    (folder / "small.toml").write_text(SMALL_SUITE)
    return tree


def commit(tree: Path, subject: str) -> None:
    author = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    for words in (("add", "--all"), (*author, "commit", "--quiet", "--message", subject)):
        subprocess.run(["git", "-C", str(tree), *words], check=True)


def commit_project(project: Path) -> None:
    """Commit what init wrote, with one small shape in place of its suite's."""
    (project / "small.toml").write_text(SMALL_SUITE)
    file = project / "flexq-bench.toml"
    file.write_text(file.read_text().replace('suite = "bench/suite.toml"', 'suite = "small.toml"'))
    commit(project, "Gate kernels")


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = {
        "HOME": str(tree.parent),
        "FLEXQ_BENCH_DB": str(tree.parent / "readme.sqlite"),
        "FLEXQ_BENCH_CACHE": str(tree.parent / "cache"),
        "PYTHONPATH": str(tree),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "flexq_bench", *arguments],
        cwd=tree,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_there_are_commands_of_the_five_uses():
    verbs = {shlex.split(command)[1] for command in COMMANDS}

    assert {"run", "sweep", "nightly", "compare", "gate", "accuracy", "decode"} <= verbs


def test_each_way_of_narrowing_is_of_a_command():
    unused = [
        start
        for start in NARROWED
        if not any(command.startswith(f"flexq-bench {start}") for command in COMMANDS)
    ]

    assert unused == []


def test_files_that_commands_read_exist():
    named = {word for command in COMMANDS for word in shlex.split(command) if "." in word[:-3]}
    files = {word for word in named if Path(word).suffix and "*" not in word}
    known = {*FILES, *OF_THE_PROJECT, *WRITTEN, *STANDS_FOR}

    assert {file for file in files - known if not (ROOT / file).exists()} == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_runs(tree):
    project = tree.parent / "project"
    stored = ""
    wrong = []
    for command in COMMANDS:
        words = [STANDS_FOR.get(word, word) for word in shlex.split(command)[1:]]
        words = [stored if word == "3f2a" else word for word in words]
        added = next(
            (
                more
                for start, more in NARROWED.items()
                if command.startswith(f"flexq-bench {start}")
            ),
            "",
        )
        words = [
            str(project / OF_THE_PROJECT[word]) if word in OF_THE_PROJECT else word
            for word in words
        ]
        ran = run(tree, *words, *shlex.split(added))
        if words[0] == "init" and ran.returncode == 0:
            commit_project(project)
        found = re.search(r"results of run (\w+)", ran.stdout)
        stored = found[1] if found and words[0] == "run" else stored
        allowed = MAY_END_WITH.get(words[0], {0})
        if ran.returncode not in allowed or "unexpected" in ran.stderr:
            wrong.append(f"{command} -> {ran.returncode}: {ran.stderr[-500:]}{ran.stdout[-300:]}")

    assert not wrong, "\n".join(wrong)

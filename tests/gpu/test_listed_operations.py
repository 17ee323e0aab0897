"""Kernels that people have (examples/byo/operations_in_triton.py), measured, gated and bisected."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.kernels import registry
from flexq_bench.kernels.external.loading import load
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Meter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import operation

FILE = Path(__file__).parents[2] / "examples" / "byo" / "operations_in_triton.py"
SHAPE = (2048, 2048)  # N and K
LINEAR = ("bf16", "fp8-blocks", "mxfp4", "tinygemm")
OTHERS = {
    "grouped": ("grouped_linear", "tokens=32 experts=8 top_k=2 n=512 k=1024"),
    "sdpa": ("attention_decode", "batch=8 context=256 heads=32 kv_heads=8 layout=contiguous"),
    "norm-int8": ("norm_quantize", "tokens=64 hidden=4096"),
    "sampling": ("top_k_sampling", "tokens=8 vocabulary=32000"),
}
NAMES = (*LINEAR, *OTHERS)
# Kernels that become slower in one commit, and in the next.
SLOWER = {
    "linear": (("bf16", "mxfp4"), ("fp8-blocks", "tinygemm")),
    "others": (("norm-int8", "sampling"), ("grouped", "sdpa")),
}
# Functions of the file in TWICE run twice; the results of all are wrong by OFF.
CHANGES = """
import functools

TWICE = []
OFF = 0.0
OUTPUTS = {"norm_int8": 2}


def changed(function):
    @functools.wraps(function)
    def called(*given, **named):
        for _ in range(1 + (function.__name__ in TWICE)):
            made = function(*given, **named)
        if OFF and made is not None:
            return made * (1 + OFF)
        for out in given[-OUTPUTS.get(function.__name__, 1) :] if OFF else ():
            out.copy_(out.float() * (1 + OFF) if out.is_floating_point() else out + 2)
        return made

    return called

"""
PROJECT = """
version = 1
name = "acme"
kernels = ["kernels.py"]
suite = "suite.toml"
policy = "policy.toml"
"""
POLICY = 'version = 1\nsuite = "suite.toml"\nslower_percent = 5.0\nowner = "acme"\n'


def changeable() -> str:
    """The file with `changed` around each kernel."""
    text = FILE.read_text()
    text, count = re.subn(r"(?ms)^(@(?:linear_)?kernel\(.*?\)\n)def ", r"\1@changed\ndef ", text)
    assert count == len(NAMES)
    return text.replace("\nCUDA = ", f"{CHANGES}\nCUDA = ", 1)


def case_of(spec, cache="cold"):
    name = spec.name.partition(".")[2]
    if name in LINEAR:
        return Case(spec.name, GemmWorkload(16, *SHAPE), stage="gemm", cache=cache)
    of, text = OTHERS[name]
    workload = operation(of).workload(**operation(of).parse(text))
    return Case(spec.name, workload, stage="op", cache=cache)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels of the file, and of one whose results are wrong by 3 %, by name."""
    made = []
    for name, off in (("right", 0.0), ("wrong", 0.03)):
        path = tmp_path_factory.mktemp(name) / "operations.py"
        path.write_text(changeable().replace("OFF = 0.0", f"OFF = {off}"))
        loaded = load(KernelSource.parse(str(path))).kernels
        made.append({kernel.spec.name.partition(".")[2]: kernel for kernel in loaded})
    return made


@pytest.mark.parametrize("name", NAMES)
def test_listed_kernel_is_right_and_its_spoiled_variant_wrong(kernels, name):
    def measured(kernel):
        of_file = {kernel.spec.label: kernel}
        meter = Meter(
            "cuda:0",
            resolve=lambda label, backend: of_file.get(label) or registry.resolve(label, backend),
        )
        return meter.measure(case_of(kernel.spec))

    right, wrong = (measured(of[name]) for of in kernels)

    assert right.status in ("ok", "noisy"), right.detail
    assert wrong.status == "incorrect", (wrong.status, wrong.detail)


def test_listed_kernels_take_at_most_thirty_lines(kernels):
    for kernel in kernels[0].values():
        function = inspect.unwrap(kernel._declared.function)
        assert len(inspect.getsource(function).splitlines()) <= 30


class Repository:
    """A repository with the kernels and a suite of them."""

    def __init__(self, folder: Path, git) -> None:
        self.folder, self._git = folder, git
        folder.mkdir()
        git(folder, "init", "-q", "-b", "main")
        groups = [
            f'[[cases]]\noperation = "{OTHERS[name][0]}"\nkernels = ["acme.{name}"]\n'
            f'caches = ["hot"]\nparameters = {{{parameters(name)}}}\n'
            for name in OTHERS
        ]
        n, k = SHAPE
        linear = ", ".join(f'"acme.{name}"' for name in LINEAR)
        groups.append(
            f'[[group]]\nkernels = [{linear}]\ncaches = ["hot"]\nm = "16"\nshapes = ["{n}x{k}"]\n'
        )
        files = {
            "kernels.py": changeable(),
            "flexq-bench.toml": PROJECT,
            "policy.toml": POLICY,
            "suite.toml": "\n".join(['description = "what people have"', *groups]),
        }
        for name, text in files.items():
            (folder / name).write_text(text)
        self.commit("base")

    def commit(self, message: str, old: str = "", new: str = "") -> str:
        path = self.folder / "kernels.py"
        path.write_text(re.sub(old, new, path.read_text()) if old else path.read_text())
        self._git(self.folder, "add", "--all")
        self._git(self.folder, "commit", "-q", "--allow-empty", "-m", message)
        return str(self._git(self.folder, "rev-parse", "HEAD"))

    def slow_down(self, names) -> str:
        functions = "".join(f'"{name.replace("-", "_")}", ' for name in names)
        return self.commit(f"slower: {', '.join(names)}", r"TWICE = \[", rf"TWICE = [{functions}")


def parameters(name: str) -> str:
    pairs = (pair.split("=") for pair in OTHERS[name][1].split())
    return ", ".join(f"{k} = {v if v.isdigit() else json.dumps(v)}" for k, v in pairs)


@pytest.fixture
def repository(tmp_path, git, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_DB", str(tmp_path / "results.sqlite"))
    return Repository(tmp_path / "acme", git)


def flexq_bench(*words: str) -> subprocess.CompletedProcess[str]:
    start = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "flexq_bench", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(f"{words[0]} {time.monotonic() - start:.1f} s, exit code {ran.returncode}")  # noqa: T201
    return ran


def gated(repository: Repository, report: Path):
    ran = flexq_bench(
        *("gate", "perf", "--project", str(repository.folder), "--base", "main~1"),
        *("--head", "main", "--keep-going", "--json", str(report)),
    )
    assert report.exists(), ran.stdout
    cases = json.loads(report.read_text())["cases"]
    verdicts = {case["case"].split()[0].partition(".")[2]: case["verdict"] for case in cases}
    print(verdicts)  # noqa: T201
    return ran.returncode, verdicts


@pytest.mark.alone
@pytest.mark.slow
def test_gate_finds_each_wrong_kernel(repository, tmp_path):
    repository.commit("wrong", "OFF = 0.0", "OFF = 0.03")

    assert gated(repository, tmp_path / "report.json") == (1, dict.fromkeys(NAMES, "incorrect"))


@pytest.mark.alone
@pytest.mark.slow
def test_gate_finds_each_slower_kernel(repository, tmp_path):
    repository.slow_down(NAMES)

    assert gated(repository, tmp_path / "report.json") == (1, dict.fromkeys(NAMES, "slower"))


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("commits", SLOWER.values(), ids=SLOWER)
def test_bisect_names_slower_commit_of_each_kernel(repository, kernels, commits):
    slower = {}
    for names in commits:
        slower |= dict.fromkeys(names, repository.slow_down(names))
    cases = {
        name: case_of(replace(kernels[0][name].spec, name=f"acme.{name}"), "hot").key
        for name in slower
    }

    ran = flexq_bench(
        *("bisect", *cases.values(), "--good", f"main~{len(commits)}", "--bad", "main"),
        *("--project", str(repository.folder), "--json"),
    )

    assert ran.returncode == 1, ran.stdout
    suspects = {found["case"]: found["suspects"] for found in json.loads(ran.stdout)}
    assert suspects == {cases[name]: [commit] for name, commit in slower.items()}

"""`--kernels-from`: external kernels, which may fail in any way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from flexq_bench.kernels import registry
from flexq_bench.kernels.external import installed
from flexq_bench.kernels.external.loading import load
from flexq_bench.measure import external_kernels

ROOT = Path(__file__).parents[2]
SHAPE = ("--m", "1", "--n", "32", "--k", "32", "--backend", "cpu")
HEAD = """
import os, sys, time
import torch
from flexq_bench.api import linear_kernel


def real(codes, scales):
    return codes.float() * scales.float().repeat_interleave(128, 1)[:, : codes.shape[1]]


def right(x_codes, x_scales, w_codes, w_scales, out):
    out.copy_(real(x_codes, x_scales) @ real(w_codes, w_scales).T)


def kernel(name):
    return linear_kernel(name, weight="int8/128", activation="int8/128", backends=["cpu"])


good = kernel("good")(right)
"""
BAD = """
@kernel("raises")
def raises(*given):
    raise ValueError("first\\nsecond")


@kernel("prints")
def prints(*given):
    print("{}")
    os.write(1, b"{}\\n")
    right(*given)


kept = [sys._getframe()]
while kept[-1].f_back is not None:
    kept.append(kept[-1].f_back)


@kernel("keeps")
def keeps(*given):
    for frame in kept:
        if any("Meter" in type(value).__name__ for value in frame.f_locals.values()):
            raise RuntimeError("what measures is in reach")
    right(*given)


@kernel("exits")
def exits(*given):
    sys.exit(0)


@kernel("nan")
def nan(*given):
    given[-1].fill_(float("nan"))


@kernel("wide")
def wide(*given):
    return torch.zeros(3, 3)


@kernel("allocates")
def allocates(*given):
    held = []
    while True:
        held.append(torch.empty(1 << 33, dtype=torch.int8))


@kernel("hangs")
def hangs(*given):
    while True:
        time.sleep(1)
"""
ENDS = """
@kernel("ends")
def ends(*given):
    os._exit(0)
"""


@pytest.fixture
def a_file(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(text))
        return str(path)

    return write


def records(text):
    return {record["kernel"]: record for record in map(json.loads, text.splitlines())}


@pytest.mark.slow
def test_kernel_that_ends_its_process_fails_alone(cli, a_file):
    ran = cli("sweep", "--kernels-from", a_file(ENDS), *SHAPE, "--json", "-")

    stored = records(ran.out)
    assert ran.code == 5
    assert stored["mine.good"]["status"] in ("ok", "noisy")
    assert stored["mine.good"]["source_hash"]
    assert stored["read-8"]["source_hash"] is None
    assert stored["mine.ends"]["status"] == "failed"
    assert stored["mine.ends"]["detail"] == "mine died (exit code 0) at 'place'"


@pytest.mark.slow
def test_unimportable_file_is_reported_and_other_kernels_measured(cli, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import no_such_thing")

    ran = cli(
        *("sweep", "--kernels-from", str(bad), "--kernels", "bad.one,cublas-fp16"),
        *(*SHAPE, "--json", str(tmp_path / "records.jsonl")),
    )

    assert ran.code == 4
    assert "bad.py: " in ran.err
    assert "does not import: ModuleNotFoundError" in ran.err
    assert "cublas-fp16" in records((tmp_path / "records.jsonl").read_text())


VERBS = {
    "run": ("run", "smoke"),
    "sweep": ("sweep", *SHAPE, "--kernels", "cublas-fp16"),
    "compare": ("compare", "HEAD", "HEAD"),
    "bisect": ("bisect", "empty gemm cold m1n1k1", "--good", "HEAD", "--bad", "HEAD"),
    "gate perf": ("gate", "perf", "--base", "HEAD"),
    "nightly": ("nightly",),
    "worker": ("worker",),
    "list": ("list", "kernels"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_missing_kernel_source_is_usage_error_of_every_command(cli, tmp_path, verb):
    (tmp_path / "kernels.txt").touch()
    for source, says in (
        (str(tmp_path / "none.py"), "there is no file"),
        (str(tmp_path / "kernels.txt"), "is no Python file: its name must end in .py"),
        ("no_such_module", "there is no module"),
        ("no-module", "there is no module"),
        (f"{'a' * 5000}/mine.py", "there is no file"),
    ):
        ran = cli(*VERBS[verb], "--kernels-from", source)

        assert ran.code == 2
        assert says in ran.error


@pytest.mark.parametrize("verb", ["worker", "list", "sweep"])
def test_unimportable_kernels_alone_are_usage_error(cli, tmp_path, verb):
    bad = tmp_path / "bad.py"
    bad.write_text("import no_such_thing")
    words = ("sweep", *SHAPE) if verb == "sweep" else VERBS[verb]

    ran = cli(*words, "--kernels-from", str(bad))

    assert ran.code == 2
    assert "does not import: ModuleNotFoundError" in ran.error


def test_list_shows_external_kernels_with_source_hash(cli, a_file):
    ran = cli("list", "kernels", "--kernels-from", a_file(""), "--json")

    (row,) = json.loads(ran.out)
    assert (row["kernel"], row["backend"], len(row["version"])) == ("mine.good", "cpu", 16)


def test_equal_kernel_names_of_two_files_are_reported(cli, tmp_path, monkeypatch):
    sources = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "mine.py"
        path.write_text(HEAD)
        sources += ["--kernels-from", str(path)]
    # In this process, because each import in another one takes seconds.
    monkeypatch.setattr(external_kernels, "described", lambda source, **more: load(source).kernels)

    ran = cli("list", "kernels", *sources, *sources[:2], "--json")

    assert [row["kernel"] for row in json.loads(ran.out)] == ["mine.good"]
    (line,) = ran.err.splitlines()
    assert f"{sources[3]} and {sources[1]} both have mine.good for cpu: rename one" in line


@pytest.mark.slow
def test_run_continues_after_every_kernel_failure(cli, a_file):
    ran = cli(
        *("sweep", "--kernels-from", a_file(BAD + ENDS), *SHAPE),
        *("--times", "case=30", "--json", "-"),
    )

    stored = records(ran.out)
    results = {name: (record["status"], record["detail"]) for name, record in stored.items()}
    assert ran.code == 1  # a wrong one comes before those that failed
    assert {results[f"mine.{name}"][0] for name in ("good", "prints", "keeps")} <= {"ok", "noisy"}
    assert results["mine.raises"] == ("failed", "ValueError: first")
    assert results["mine.exits"][1].startswith("mine died (exit code 0) at 'place'")
    assert results["mine.nan"][0] == "incorrect"
    assert "= nan, expected" in results["mine.nan"][1]
    assert "returned float32 [3, 3]" in results["mine.wide"][1]
    assert results["mine.allocates"][0] == "failed"
    assert "memory" in results["mine.allocates"][1]
    assert results["mine.hangs"][1] == "mine gave no answer to 'place' in 30 s and was ended"


PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "Acme-Kernels"
version = "1.0"

[project.entry-points."flexq_bench.kernels"]
fast = "acme_kernels.fast"

[tool.setuptools]
packages = ["acme_kernels"]
"""


@pytest.fixture
def installed_package(tmp_path, monkeypatch):
    """A file of the processes that imported an installed package with the kernel acme.good."""
    site, imported = tmp_path / "site", tmp_path / "imported"
    info = site / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flexq_bench.kernels]\ngood = acme_fast\n")
    log_line = (
        f"print(os.getpid(), os.getenv('FLEXQ_BENCH_DB'), file=open({str(imported)!r}, 'a'))\n"
    )
    (site / "acme_fast.py").write_text(HEAD + log_line)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(installed, "_find", installed._find)  # as it is, and so again afterwards
    registry._find_installed.cache_clear()
    yield imported
    registry.remove(["acme.good"])


def processes_of(imported):
    return {line.split()[0]: line.split()[1] for line in imported.read_text().splitlines()}


def test_list_runs_no_code_of_installed_packages(cli, installed_package):
    listed = json.loads(cli("list", "kernels", "--json").out)

    assert "acme.good" in {row["kernel"] for row in listed}
    assert str(os.getpid()) not in processes_of(installed_package)


@pytest.mark.slow
def test_dashboard_runs_no_code_of_installed_packages(installed_package, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_DB", "postgresql://ada:secret@db.internal/flexq")
    AppTest.from_file(str(ROOT / "dashboard" / "app.py"), default_timeout=30).run()

    assert "acme.good" in registry.labels("cpu")
    imported = processes_of(installed_package)
    assert str(os.getpid()) not in imported
    assert set(imported.values()) == {"None"}


@pytest.mark.slow  # builds a wheel
def test_kernel_of_installed_wheel_is_measured(tmp_path):
    project, site = tmp_path / "project", tmp_path / "site"
    (project / "acme_kernels").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PYPROJECT)
    (project / "acme_kernels" / "__init__.py").touch()
    (project / "acme_kernels" / "fast.py").write_text(HEAD)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    alone = ("--no-deps", "--no-index")
    made = ("wheel", *alone, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(project))
    subprocess.run([*pip, *made], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", *alone, "--target", str(site), str(wheel)], check=True)

    ran = subprocess.run(
        [
            *(sys.executable, "-m", "flexq_bench", "sweep", *SHAPE, "--json", "-"),
            *("--kernels", "acme-kernels.good,cublaslt-w8a8", "--db", str(tmp_path / "f.sqlite")),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )

    stored = records(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    assert {"acme-kernels.good", "cublaslt-w8a8"} < stored.keys()
    assert stored["acme-kernels.good"]["status"] in ("ok", "noisy")
    assert len(stored["acme-kernels.good"]["source_hash"]) == 16
    assert stored["cublaslt-w8a8"]["source_hash"] is None


@pytest.mark.slow
def test_external_kernels_run_on_suite_and_compare_interleaved(cli, a_file, tmp_path):
    suite = tmp_path / "tiny.toml"
    suite.write_text(
        'description = "tiny"\n[[group]]\nkernels = ["cublas-fp16"]\nm = "1"\nshapes = ["32x32"]\n'
    )
    path = a_file('also = kernel("also")(right)\n')

    ran = cli("run", str(suite), "--kernels-from", path, "--backend", "cpu", "--json", "-")
    compared = cli(
        *("compare", "mine.good", "mine.also", "--kernels-from", path, "--suite", str(suite)),
        *("--backend", "cpu", "--processes", "1", "--json"),
    )

    assert {"mine.good", "mine.also", "cublas-fp16"} < records(ran.out).keys()
    assert json.loads(compared.out)["kind"] == "kernels"
    assert compared.code in (0, 1, 3)

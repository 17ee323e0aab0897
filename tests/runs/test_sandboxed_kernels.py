"""External kernels of a run, in a sandbox."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Tuning, external_kernels, kernel_processes, sandbox
from flexq_bench.measure.kernel_processes import ProcessOptions
from flexq_bench.measure.launcher import FreshProcesses
from flexq_bench.measure.sandbox import KINDS, obstacle
from flexq_bench.runs.process_meter import SANDBOX, ProcessMeter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

WORKING = [kind for kind in KINDS if not obstacle(kind)]
KERNEL = """
from flexq_bench.api import linear_kernel

def harm():
    {harm}

@linear_kernel("{name}", weight="fp16", backends=["cpu"])
def kernel(x, w, out):
    harm()
    out.copy_(x @ w.T)
"""
ORPHAN = """
    import os
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "{seconds}"], {{}})
        os._exit(0)
"""
HARMS = {
    "disk": "[open(f'/tmp/{n}', 'wb').write(bytes(1 << 24)) for n in range(400)]",
    "memory": (
        "import mmap, time; m = mmap.mmap(-1, 1 << 30); m.write(bytes(1 << 30)); time.sleep(60)"
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not WORKING, reason="this machine allows no sandbox")
def test_kernel_that_fills_the_machine_fails_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(sandbox.VARIABLE)
    limits = sandbox.SandboxLimits(memory_bytes=900 << 20, files_bytes=64 << 20)
    made = kernel_processes.sandbox_of
    monkeypatch.setattr(
        *(kernel_processes, "sandbox_of"),
        lambda *given, **named: replace(made(*given, **named), limits=limits),
    )
    seconds = f"1{time.monotonic_ns() % 10**8}"
    harms = {**HARMS, "honest": "pass", "orphan": ORPHAN.format(seconds=seconds).strip()}
    sources = []
    for name, harm in harms.items():
        (tmp_path / f"{name}.py").write_text(KERNEL.format(name=name, harm=harm))
        sources.append(KernelSource(str(tmp_path / f"{name}.py"), "acme"))
    known = external_kernels.adopt(sources)
    try:
        options = ProcessOptions("cpu", 0, Tuning.NONE, 180.0, 180.0)
        with ProcessMeter(options, known) as meter:
            found = {
                name: meter.measure(Case(f"acme.{name}", GemmWorkload(1, 64, 64))) for name in harms
            }
    finally:
        external_kernels.forget()

    assert found["honest"].status in ("ok", "noisy"), found["honest"].detail
    assert found["disk"].status == found["memory"].status == "failed"
    assert "No space left" in found["disk"].detail
    assert "may use 0.94 GB" in found["memory"].detail
    assert found["honest"].extra[SANDBOX] == WORKING[0]
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if _has(path, seconds)]


@pytest.mark.skipif(not WORKING, reason="this machine allows no sandbox")
def test_file_of_a_package_imports_from_all_of_it(tmp_path, monkeypatch):
    monkeypatch.delenv(sandbox.VARIABLE)
    for folder in ("acme", "acme/kernels", "acme/tools"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "acme" / "tools" / "names.py").write_text("NAME = 'honest'\n")
    file = tmp_path / "acme" / "kernels" / "own.py"
    file.write_text("from acme.tools.names import NAME\n" + KERNEL.format(name="own", harm="pass"))
    source = KernelSource.parse(str(file))

    launcher = FreshProcesses(external_kernels.sandbox_of([source]).wrap)
    (kernel,) = external_kernels.described(source, launcher=launcher)

    assert kernel.spec.name.endswith(".own")


def _has(path: Path, text: str) -> bool:
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False

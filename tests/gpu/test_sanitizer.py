"""compute-sanitizer finds nothing in any kernel: no wrong address, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flexq_bench.kernels.contract import OperationKernel
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.registry import labels, resolve

HERE = Path(__file__).parent
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin"
)
AT_ONCE = 8  # processes: the tool spends its time on the CPU
# 49 widths of one source: these stand for all of them.
ABQ = ("abq-w2a2", "abq-w3a5", "abq-w6a6", "abq-w8a8")
# racecheck reports hazards in kernels of cuBLASLt's (nvjet_…) and breaks if told to skip them.
OF_A_LIBRARY = {("racecheck", label) for label in ("cublaslt-fp8", "cublas-fp16", "fp16")}
PARTLY_OURS = ("fp16",)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer (NVIDIA's CUDA toolkit)"),
]


def watched() -> list[str]:
    import torch

    found = []
    for label in labels("cuda"):
        kernel = resolve(label, "cuda")
        spec = kernel.spec
        if isinstance(kernel, OperationKernel):  # launch_operations.py has those
            continue
        try:
            spec.check_capability(torch.cuda.get_device_capability())
        except UnsupportedError:
            continue
        if spec.package is not None:  # what a package does in its own memory is its own
            continue
        if not label.startswith("abq-") or label in ABQ or spec.variant:
            found.append(label)
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing_in_any_kernel(tool: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "99"]
    program = [sys.executable, str(HERE / "launch_kernels.py")]
    # Without torch's pool a tensor is an allocation of its own, so that no neighbour hides a wrong
    # address.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), *sys.path])
    every = [label for label in watched() if (tool, label) not in OF_A_LIBRARY]
    programs = [[*program, *every[first::AT_ONCE]] for first in range(AT_ONCE)]
    programs.append([*program, "--own", *PARTLY_OURS])
    few_tokens = ["--few-tokens"] if tool == "racecheck" else []
    programs.append([sys.executable, str(HERE / "launch_operations.py"), *few_tokens])
    started = [
        subprocess.Popen(
            [*command, *program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for program in programs
    ]
    said = [process.communicate()[0] for process in started]
    failed = [
        text[-4000:] for process, text in zip(started, said, strict=True) if process.returncode
    ]
    assert not failed, "\n".join(failed)

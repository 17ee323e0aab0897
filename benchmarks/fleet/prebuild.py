"""Compilation of a plan's kernels before a nightly run, with one process per core."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.registry import resolve
from flexq_bench.kernels.runtime.gpu import OF_TARGET, chosen_for
from flexq_bench.kernels.runtime.nvrtc import Build, compile_build
from flexq_bench.workloads.case import Case


def architecture() -> str:
    """Architecture of the first GPU, from nvidia-smi: a CUDA context would take the GPU."""
    command = ("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"sm_{answer.splitlines()[0].strip().replace('.', '')}"


def builds_of(cases: Iterable[Case], arch: str) -> list[Build]:
    """Return the builds that untuned cases run on a GPU of this architecture, packing included."""
    found: dict[Build, None] = {}
    with chosen_for(OF_TARGET[arch]):
        for case in cases:
            kernel = resolve(case.label, "cuda")
            found.update(dict.fromkeys(kernel.builds_for(case.gemm, None)))
    # Packing is not in what runs a case; it has few builds, and all of them are wanted.
    for label in {case.label for case in cases}:
        packing = (b for b in resolve(label, "cuda").builds() if "pack" in b.source)
        found.update(dict.fromkeys(packing))
    return list(found)


def compile_all(builds: list[Build], arch: str) -> list[str]:
    """Into the cache; what did not compile, with the reason."""
    processes = min(os.cpu_count() or 1, len(builds))
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        return [problem for problem in pool.map(partial(_compile, arch), builds) if problem]


def _compile(arch: str, build: Build) -> str:
    try:
        compile_build(build, arch)
    except KernelError as error:
        return f"{build.name}: {str(error).splitlines()[0]}"
    return ""

"""A git repository with a `kernels` package so small that its one source compiles at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COPIED = (
    "kernels/errors.py",
    "kernels/runtime/files.py",
    "kernels/runtime/nvrtc.py",
    "kernels/runtime/sources.py",
)

REGISTRY = """
from flexq_bench.kernels.runtime.nvrtc import Block, Build

BUILD = Build.of("tiny.cu", block=Block("tiny", THREADS, SHARED), COUNT=COUNT)


class Kernel:
    def builds(self):
        return [BUILD]

    def builds_for(self, gemm, config):
        return [BUILD]


def labels(backend):
    return ("tiny-w6a6",)


def resolve(label, backend):
    return Kernel()
"""
# It keeps COUNT values in registers until all threads are there.
SOURCE = """
#include "tiny.cuh"
extern "C" __global__ void __launch_bounds__(THREADS) tiny(const float* x, float* y) {
  float kept[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) kept[i] = x[i * THREADS + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) y[(COUNT - i) * THREADS + threadIdx.x] = kept[i] * kept[1];
}
"""


@dataclass(frozen=True)
class Repository:
    """A git repository whose commits are versions of one small kernel."""

    folder: Path
    run_git: Callable[..., str]
    source: str = SOURCE

    def git(self, *arguments: str) -> str:
        return self.run_git(self.folder, *arguments)

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def commit(
        self,
        *,
        threads: int = 256,
        shared: int = 0,
        count: int = 16,
        source: str = SOURCE,
        path: str = "tiny.cu",
        only_sm: int | None = None,
    ) -> str:
        """The sha of a commit of this version. path: of its source in csrc."""
        registry = REGISTRY.replace("THREADS", str(threads)).replace("SHARED", str(shared))
        registry = registry.replace("tiny.cu", path)
        registry = registry.replace("COUNT=COUNT", f"COUNT={count}, only_sm={only_sm}")
        self.write("kernels/registry.py", registry)
        for moved in (self.folder / "kernels" / "csrc").rglob("*.cu"):
            moved.unlink()
        self.write(f"kernels/csrc/{path}", source)
        self.write("kernels/csrc/tiny.cuh", f"constexpr int THREADS = {threads};\n")
        self.git("add", ".")
        self.git("commit", "-q", "--allow-empty", "-m", "version")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, toolchain: None, git: Callable[..., str]) -> Repository:
    """A repository with everything but the kernel in it; nothing is committed yet."""
    made = Repository(tmp_path / "repository", git)
    for path in COPIED:
        (made.folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, made.folder / path)
    made.write("flexq_bench/__init__.py", "")
    for room in ("kernels", "workloads"):
        (made.folder / "flexq_bench" / room).symlink_to(Path("..", room))
    made.write("kernels/runtime/__init__.py", "")
    made.write("workloads/gemm.py", "class GemmWorkload:\n    def __init__(self, *sizes): pass\n")
    made.git("init", "-q", "-b", "main")
    return made

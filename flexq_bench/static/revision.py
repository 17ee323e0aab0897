"""The builds of a checked-out revision, listed and compiled by that revision's own packages."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flexq_bench.errors import InfrastructureError
from flexq_bench.static import worker
from kernels.runtime.nvrtc import Block, Build, Cubin
from kernels.runtime.sources import source_hash
from workloads.gemm import GemmWorkload

# One token and many are compiled differently; N and K are arguments of a launch.
DEFAULT_SHAPES = (GemmWorkload(1, 4096, 4096), GemmWorkload(8, 4096, 4096))
_COMPILER = Path("kernels/runtime/nvrtc.py")  # its text has every option that sources get


@dataclass(frozen=True, slots=True)
class ListedBuild:
    """A build that a revision has.

    kernels: labels that may compile it. default_of: those that run it unless they are tuned.
    identity: of all that the compiler is given; equal identities are equal machine code.
    """

    index: int
    build: Build
    kernels: tuple[str, ...]
    default_of: tuple[str, ...]
    identity: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """The machine code of a build for a target; cubin None: it did not compile, error says why."""

    build: ListedBuild
    target: str
    cubin: Cubin | None
    error: str = ""


class Revision:
    """A revision's process: it lists its builds once, then compiles once what `start` is given."""

    def __init__(self, name: str, folder: Path, process: _Process) -> None:
        self.name = name
        self._folder = folder
        self._process = process
        self._builds: tuple[ListedBuild, ...] = ()
        self._work: tuple[tuple[ListedBuild, str], ...] = ()
        self._out = folder

    def builds(self) -> tuple[ListedBuild, ...]:
        """Every build of every CUDA kernel. Raises InfrastructureError if it can't list them."""
        listing = self._process.read()
        if "error" in listing:
            raise InfrastructureError(f"{self.name} can't list its builds: {listing['error']}")
        described = enumerate(listing["builds"])
        self._builds = tuple(self._listed(index, build) for index, build in described)
        return self._builds

    def start(self, work: Sequence[tuple[ListedBuild, str]], out: Path) -> None:
        """Let it compile builds for targets; `out`: an empty folder for what comes of it."""
        items = [[build.index, target] for build, target in work]
        self._work, self._out = tuple(work), out
        self._process.write({"out": str(out), "work": items})

    def compiled(self) -> Iterator[Compiled]:
        """Machine code of what `start` was given, one by one.

        Raises InfrastructureError if the process ends before it has answered everything.
        """
        for _ in self._work:
            answer = self._process.read()
            build, target = self._builds[answer["index"]], answer["target"]
            if "error" in answer:
                yield Compiled(build, target, None, answer["error"])
            else:
                code = (self._out / answer["code"]).read_bytes()
                yield Compiled(build, target, Cubin(build.build.source, target, code))

    def _listed(self, index: int, described: dict[str, Any]) -> ListedBuild:
        block = described["block"]
        build = Build(
            described["source"],
            tuple((name, value) for name, value in described["defines"]),
            described["min_sm"],
            Block(*block) if block else None,
        )
        texts = [
            source_hash(self._folder / "kernels" / "csrc", build.source),
            (self._folder / _COMPILER).read_text(),
            build.name,
        ]
        identity = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        owners = (tuple(described["kernels"]), tuple(described["default_of"]))
        return ListedBuild(index, build, *owners, identity)


class _Process:
    """The worker of one checkout: JSON lines to and from it."""

    def __init__(
        self, name: str, folder: Path, environment: Mapping[str, str], errors: IO[str]
    ) -> None:
        shapes = json.dumps([[g.m, g.n, g.k] for g in DEFAULT_SHAPES])
        self._name = name
        self._errors = errors
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker.__file__)), str(folder), shapes],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    def write(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended_early() from None

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended_early()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it may compile in several processes
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _ended_early(self) -> InfrastructureError:
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines() or ["it says nothing"]
        return InfrastructureError(
            f"{self._name}: compiling ended with status {status}: {said[-1]}"
        )


@contextmanager
def open_revision(name: str, folder: Path, environment: Mapping[str, str]) -> Iterator[Revision]:
    """The process of the checkout in `folder`. name: for people, for example "base 1a2b3c".

    environment: all of its variables but PYTHONPATH.
    """
    with tempfile.TemporaryFile("w+") as errors:
        process = _Process(name, folder, environment, errors)
        try:
            yield Revision(name, folder, process)
        finally:
            process.end()

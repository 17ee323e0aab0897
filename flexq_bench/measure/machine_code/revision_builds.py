"""The builds of a checked-out revision, listed and compiled by that revision's own packages."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexq_bench.errors import InfrastructureError
from flexq_bench.kernels.runtime.files import read_regular, temporary_folder
from flexq_bench.kernels.runtime.nvrtc import Block, Build, Cubin
from flexq_bench.kernels.runtime.sources import source_hash
from flexq_bench.measure.launcher import FreshProcesses
from flexq_bench.measure.machine_code import worker
from flexq_bench.measure.sandbox import Kind, building
from flexq_bench.measure.worker_process import WorkerProcess, read_as_reply
from flexq_bench.workloads.gemm import GemmWorkload

# One token and many tokens are compiled differently; N and K are arguments of a launch.
DEFAULT_SHAPES = (GemmWorkload(1, 4096, 4096), GemmWorkload(8, 4096, 4096))
_COMPILER = Path("kernels/runtime/nvrtc.py")  # its text contains every option of the compiler


@dataclass(frozen=True, slots=True)
class ListedBuild:
    """A build of a revision.

    kernels: labels that may compile it. default_of: those that run it without tuning. identity: of
    the compiler's whole input; equal identities give equal machine code.
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
    """A revision's process: it lists its labels, then its builds, then compiles the work of
    `start`.

    Each step is done once. out: an empty folder for the results.
    """

    def __init__(self, process: WorkerProcess, out: Path) -> None:
        self.name = process.name
        self._process = process
        # Sent before anybody waits for it, so that two revisions import their packages at the same
        # time.
        process.send("list_labels")
        self._work: tuple[tuple[ListedBuild, str], ...] = ()
        self._out = out

    def labels(self) -> tuple[str, ...]:
        """Labels of its CUDA kernels, in seconds; listing their builds continues and takes longer.

        Raises InfrastructureError if it can't list them.
        """
        with read_as_reply(self.name):
            labels = tuple(map(str, self._listing("kernels")["labels"]))
        self._process.send("list_builds", shapes=[[g.m, g.n, g.k] for g in DEFAULT_SHAPES])
        return labels

    def builds(self) -> tuple[ListedBuild, ...]:
        """Every build of every CUDA kernel; call after `labels`. Raises the same exceptions."""
        with read_as_reply(self.name):
            described = enumerate(self._listing("builds")["builds"])
            return tuple(self._listed(index, build) for index, build in described)

    def start(self, work: Sequence[tuple[ListedBuild, str]]) -> None:
        """Compile builds for targets."""
        items = [[build.index, target] for build, target in work]
        self._work = tuple(work)
        self._process.send("compile", out=str(self._out), work=items)

    def compiled(self) -> Iterator[Compiled]:
        """Machine code of the work of `start`, one by one.

        Raises WorkerError if the process ends before it has answered everything.
        """
        asked = {(build.index, target): build for build, target in self._work}
        while asked:
            with read_as_reply(self.name):
                answer = self._process.receive()
                target = answer["target"]
                build = asked.pop((answer["index"], target))
                cubin = None
                if "error" not in answer:
                    code = read_code(self._out, answer["code"])
                    cubin = Cubin(build.build.source, target, code)
            yield Compiled(build, target, cubin, answer.get("error", ""))

    def _listing(self, what: str) -> dict[str, Any]:
        listing = self._process.receive()
        if "error" in listing:
            raise InfrastructureError(f"{self.name} can't list its {what}: {listing['error']}")
        return listing

    def _listed(self, index: int, described: dict[str, Any]) -> ListedBuild:
        block, only_sm = described["block"], described["only_sm"]
        build = Build(
            str(described["source"]),
            tuple((str(name), value) for name, value in described["defines"]),
            int(described["min_sm"]),
            Block(str(block[0]), *map(int, block[1:])) if block else None,
            None if only_sm is None else int(only_sm),
        )
        texts = [
            source_hash(self._process.tree / "kernels" / "csrc", build.source),
            read_regular(self._process.tree / _COMPILER).decode(errors="replace"),
            build.name,
        ]
        identity = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        kernels, default_of = (tuple(map(str, described[of])) for of in ("kernels", "default_of"))
        return ListedBuild(index, build, kernels, default_of, identity)


def read_code(folder: Path, name: str) -> bytes:
    """Machine code that a process wrote to a file. Raises InfrastructureError for other files."""
    path = folder / name
    try:
        if path.parent == folder:
            return read_regular(path, follow=False)
    except (OSError, ValueError):
        pass  # it is no file, or one that the process changes meanwhile
    raise InfrastructureError(f"a process wrote its machine code to {name!r}, which is no file")


@contextmanager
def open_revision(
    name: str,
    folder: Path,
    environment: Mapping[str, str],
    *,
    sandbox: Kind = "none",
) -> Iterator[Revision]:
    """The process of the checkout in `folder`. name: for people, for example "base 1a2b3c".

    environment: all of its variables except PYTHONPATH. sandbox: kind of its sandbox, for a
    revision that is not trusted.
    """
    # -P: the folder of the script contains modules of ours, not the revision's.
    command = (sys.executable, "-P", str(Path(worker.__file__)), str(folder))
    with temporary_folder() as out, ExitStack() as stack:
        wrap = stack.enter_context(building(environment, sandbox, out, read=[folder]))
        # Without a time limit: compiling everything may take hours.
        process = WorkerProcess(
            name, folder, command, environment=environment, launcher=FreshProcesses(wrap)
        )
        yield Revision(stack.enter_context(process), out)

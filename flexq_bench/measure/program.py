"""This program as the processes of other repositories' kernels import it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import flexq_bench
from flexq_bench.kernels.external.sources import KernelSource, top_of_package
from flexq_bench.kernels.runtime.files import cache_folder
from flexq_bench.measure.launcher import Launcher
from flexq_bench.measure.sandbox import Sandbox, available_kind
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.worker_process import WorkerError, WorkerProcess
from flexq_bench.packages import PACKAGE

WORKER = "flexq_bench.measure.ab.worker"
LOADER = (sys.executable, "-m", "flexq_bench.measure.external_loader")
LOAD_TIMEOUT_S = 180.0  # for the import of a file, which may build an extension
_TRITON_CACHE = Path(".triton", "cache")  # in a home


def program_root(packages: Path | None = None) -> Path:
    """A folder with a link to the package of this process, and nothing else.

    packages: the folder that contains the package; None: that of this file. It comes first on a
    worker's path, and must not hide packages that a project has, or has installed.
    """
    root = packages or Path(flexq_bench.__file__).resolve().parents[1]
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:16]
    links = cache_folder() / "program" / digest
    links.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (links / PACKAGE).symlink_to(root / PACKAGE)
    return links


def loading(
    source: KernelSource,
    *,
    timeout_s: float = LOAD_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
) -> WorkerProcess:
    """A process that was asked to load a source; see flexq_bench.measure.external_loader.

    environment, launcher: see WorkerProcess. Returns at once: `receive` gives the reply.
    """
    name = Path(source.place).name if source.is_file else source.place
    loader = WorkerProcess(
        name,
        program_root(),
        LOADER,
        timeout_s=timeout_s,
        environment=environment,
        launcher=launcher,
    )
    with suppress(WorkerError):  # raised by `receive`, which finds no reply
        loader.send("load", source=source.argument)
    return loader


def sandbox_of(
    sources: Sequence[KernelSource],
    environment: Mapping[str, str] | None = None,
    folders: Sequence[Path] = (),
    exchange: Exchange | None = None,
) -> Sandbox:
    """The sandbox of processes that load these sources, where this machine allows one.

    environment: of the processes; None: ours. folders: that they read, too. exchange: of inputs and
    outputs with them.
    """
    variables = os.environ if environment is None else environment
    kind = available_kind() if sources else "none"
    read = [*folders, program_root(), *map(_folder_of, sources)]
    caches = [cache_folder() / "cubin", cache_folder() / "tuning", Path.home() / _TRITON_CACHE]
    write = []
    if exchange is not None:
        read.append(exchange.inputs)
        write.append(exchange.outputs)
    return Sandbox(dict(variables), kind, read=read, write=write, prefilled=caches)


def _folder_of(source: KernelSource) -> Path:
    """The folder that a source's modules are in, without running any of its code.

    A file in a package may import from all of it, by its full name.
    """
    if source.is_file:
        return top_of_package(Path(source.place))
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(source.place.partition(".")[0])
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).parent
    return program_root()  # nothing more to see

"""This program as the processes of other repositories' kernels import it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import flexq_bench
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.kernels.runtime.files import cache_folder
from flexq_bench.measure.launcher import Launcher
from flexq_bench.measure.worker_process import WorkerError, WorkerProcess
from flexq_bench.packages import PACKAGE

LOADER = (sys.executable, "-m", "flexq_bench.measure.external_loader")
LOAD_TIMEOUT_S = 180.0  # for the import of a file, which may build an extension


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

"""External kernels in this process: known by their descriptions, run only in worker processes.

The import of an external file may run any code. A separate process imports it and describes its
kernels; this process never runs its code.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend, LinearKernel
from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.external.described import DescribedKernel, described_by
from flexq_bench.kernels.external.loading import ENTRY_POINTS, refuse_taken
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.launcher import FreshProcesses, Launcher
from flexq_bench.measure.own_quantization import plain_description
from flexq_bench.measure.program import (
    LOAD_TIMEOUT_S,
    LOADER,
    loading,
    program_root,
    sandbox_of,
)
from flexq_bench.measure.sandbox import Sandbox
from flexq_bench.measure.worker_messages import printable
from flexq_bench.measure.worker_process import RefusedError, WorkerError, WorkerProcess
from flexq_bench.workloads.errors import WorkloadError

OPTION = "--kernels-from"
_MAX_SHOWN_CHARS = 80  # characters of a file's output

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """Kernel sources that were loaded or failed. labels: of the kernels, by source.

    failures: the reason why a source has no kernels. environment: of the processes that run them;
    None: ours.
    """

    labels: dict[KernelSource, tuple[str, ...]]
    failures: dict[KernelSource, str]
    environment: Mapping[str, str] | None = None

    @property
    def sources(self) -> tuple[KernelSource, ...]:
        return tuple(self.labels)

    @property
    def all_labels(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for labels in self.labels.values() for label in labels))


_NOTHING = Adopted({}, {})
_state = _NOTHING


def adopted() -> Adopted:
    """The sources whose kernels are registered in this process."""
    return _state


def adopt(
    sources: Iterable[KernelSource],
    *,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    loaders: Mapping[KernelSource, WorkerProcess] = MappingProxyType({}),
) -> Adopted:
    """Register the kernels of sources.

    A source that can't be loaded, or has a kernel of an earlier one, is among the failures; the
    others are registered. environment: of the processes that run them; None: ours. launcher: starts
    those that describe them; None: each as a fresh process in a sandbox of its own. loaders: those
    of them that were started before.
    """
    global _state
    labels, failures = dict(_state.labels), dict(_state.failures)
    owners: dict[tuple[str, str], KernelSource] = {}
    for source in sources:
        try:
            starts = launcher or FreshProcesses(sandbox_of([source], environment).wrap)
            begun = loaders.get(source)
            kernels = described(source, environment=environment, launcher=starts, loader=begun)
            refuse_taken(kernels, source, owners)
        except (RefusedError, WorkerError, KernelError) as error:
            failures[source] = str(error)
            continue
        registry.add(kernels)
        labels[source] = tuple(dict.fromkeys(kernel.spec.label for kernel in kernels))
    _state = Adopted(labels, failures, environment)
    return _state


@dataclass(frozen=True, slots=True)
class KernelDescriptions:
    """Adopted kernels as plain values, for a process that has no files of them.

    specs: of all kernels, see plain_description. Others as in Adopted, by the sources' prefixes.
    """

    specs: tuple[dict[str, Any], ...]
    labels: Mapping[str, tuple[str, ...]]
    failures: Mapping[str, str]


def descriptions_of(kernels: Adopted) -> KernelDescriptions:
    """Describe the kernels that this process has adopted."""
    backends: tuple[Backend, ...] = ("cuda", "cpu")
    described = [
        registry.resolve(label, backend)
        for backend in backends
        for label in registry.labels(backend)
        if label in kernels.all_labels
    ]
    return KernelDescriptions(
        tuple(
            plain_description(kernel) for kernel in described if isinstance(kernel, LinearKernel)
        ),
        {source.prefix: labels for source, labels in kernels.labels.items()},
        {source.prefix: reason for source, reason in kernels.failures.items()},
    )


def adopt_descriptions(described: KernelDescriptions) -> Adopted:
    """Register kernels that run in other processes only; those that are registered stay."""
    global _state
    known = set(registry.external_labels())
    kernels = map(described_by, described.specs)
    registry.add([kernel for kernel in kernels if kernel.spec.label not in known])
    labels, failures = dict(_state.labels), dict(_state.failures)
    for prefix, of_source in described.labels.items():
        labels.setdefault(KernelSource(prefix, prefix), of_source)
    for prefix, reason in described.failures.items():
        failures.setdefault(KernelSource(prefix, prefix), reason)
    _state = Adopted(labels, failures, _state.environment)
    return _state


def sandbox_of_adopted(tree: Path) -> Sandbox:
    """The sandbox of processes that run a tree's program with the adopted sources."""
    return sandbox_of(_state.sources, _state.environment, [tree])


def log_failures() -> None:
    """Log one line for each source that could not be loaded."""
    for reason in _state.failures.values():
        log.warning("%s", reason)


def forget() -> None:
    """Unregister all adopted kernels."""
    global _state
    registry.remove(_state.all_labels)
    _state = _NOTHING


def described(
    source: KernelSource,
    *,
    timeout_s: float = LOAD_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    launcher: Launcher | None = None,
    loader: WorkerProcess | None = None,
) -> tuple[DescribedKernel, ...]:
    """The kernels of a source as another process describes them.

    environment, launcher: of that process; see WorkerProcess. loader: the process, if it was
    started before. Raises RefusedError or WorkerError with one line: the source does not import,
    ends its process, has no kernel, or takes longer than timeout_s.
    """
    if loader is None:
        loader = loading(source, timeout_s=timeout_s, environment=environment, launcher=launcher)
    name = loader.name
    with loader:
        reply = loader.receive()
    printed = " ".join(str(reply["printed"]).split())
    if printed:
        log.warning(
            "%s printed when it was imported: %s", name, printable(printed)[:_MAX_SHOWN_CHARS]
        )
    return _kernels_of(reply, name)


def describe_installed() -> tuple[DescribedKernel, ...]:
    """The kernels of installed packages as another process describes them, without the database.

    For a process that measures nothing: the registry calls this through
    `kernels.external.installed.find_by`. Packages that can't be described are left out, with one
    line in the log.
    """
    if not metadata.entry_points(group=ENTRY_POINTS):
        return ()
    name = "installed packages with kernels"
    loader = WorkerProcess(name, program_root(), LOADER, timeout_s=LOAD_TIMEOUT_S)
    try:
        with loader:
            return _kernels_of(loader.ask("installed"), name)
    except (RefusedError, WorkerError) as error:
        log.warning("%s", error)
        return ()


def _kernels_of(reply: Mapping[str, Any], name: str) -> tuple[DescribedKernel, ...]:
    try:
        return tuple(map(described_by, reply["specs"]))
    except (KeyError, TypeError, KernelError, WorkloadError) as error:
        raise WorkerError(f"{name}: its description can't be read: {error}") from None


def options_of(sources: Sequence[KernelSource]) -> tuple[str, ...]:
    """Options that make a worker process load the sources."""
    return tuple(part for source in sources for part in (OPTION, source.argument))


def without_failed(patterns: Sequence[str], loaded: Adopted) -> tuple[str, ...]:
    """Labels and globs without those of failed sources, which are known to be missing."""
    lost = tuple(f"{source.prefix}." for source in loaded.failures)
    return tuple(pattern for pattern in patterns if not pattern.startswith(lost or ("\0",)))

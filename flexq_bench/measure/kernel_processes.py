"""Worker processes that run external kernels, while this process judges them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Self

import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.external_case import ExternalCase
from flexq_bench.measure.external_kernels import Adopted, options_of, sandbox_of
from flexq_bench.measure.launcher import FreshProcesses, Launcher, forking_launcher
from flexq_bench.measure.program import program_root
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.sandbox import Kind
from flexq_bench.measure.shared_tensors import Exchange, exchange_folder
from flexq_bench.measure.tuning import Tuning
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.workloads.case import Case

WORKER = "flexq_bench.measure.ab.worker"


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options of worker processes. environment None: that of this process. start_s: time limit of a
    start; case_s: of a case, after which the process is killed."""

    device: str
    seed: int
    tuning: Tuning
    start_s: float
    case_s: float
    environment: Mapping[str, str] | None = None


class KernelProcesses:
    """One process at a time, with the kernels of one source; a context manager.

    A process of installed packages has no source. They run in a sandbox where this machine allows
    one; sandbox: its kind, of the latest process. launcher: starts those without a sandbox; None: a
    fork server of its own.
    """

    def __init__(
        self, options: ProcessOptions, kernels: Adopted, launcher: Launcher | None = None
    ) -> None:
        self._options = options
        self._source_of = {
            label: source for source, labels in kernels.labels.items() for label in labels
        }
        self._process: WorkerProcess | None = None
        self._group: str | None = None
        self.sandbox: Kind = "none"
        with ExitStack() as stack:
            self._exchange = stack.enter_context(Exchange(stack.enter_context(exchange_folder())))
            self._launcher = launcher or stack.enter_context(forking_launcher(program_root()))
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None and self._process is not None:
            self._process.kill()
        self.end()
        self._resources.close()

    def group_of(self, case: Case) -> str:
        """The key of cases of external kernels that share a process."""
        source = self._source_of.get(case.label)
        return _package_of(case) if source is None else source.argument

    def prepared(
        self, kernel: LinearKernel, case: Case, device: torch.device, protocol: Protocol
    ) -> ExternalCase:
        """The case, to be measured in a process of its kernel. Raises WorkerError."""
        worker = self._process_for(case)
        worker.allow(self._options.case_s, in_all=True)
        return ExternalCase(worker, kernel, case, self._exchange, device, protocol)

    def paused(self) -> AbstractContextManager[None]:
        """Stop the process, so that it can't disturb what this one measures."""
        return nullcontext() if self._process is None else self._process.paused()

    def end(self) -> None:
        """End the process, so that its state does not affect what follows."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _process_for(self, case: Case) -> WorkerProcess:
        group = self.group_of(case)
        if self._process is None or self._group != group:
            self.end()
            source = self._source_of.get(case.label)
            self._process = self._start(_package_of(case), () if source is None else (source,))
            self._group = group
        return self._process

    def _start(self, name: str, sources: Sequence[KernelSource]) -> WorkerProcess:
        options = self._options
        sandbox = sandbox_of(sources, options.environment, exchange=self._exchange)
        self.sandbox = sandbox.kind
        process = WorkerProcess(
            name,
            program_root(),
            (
                *(sys.executable, "-m", WORKER, "--device", options.device),
                *("--seed", str(options.seed), "--tuning", options.tuning.value),
                *options_of(sources),
            ),
            timeout_s=options.start_s,
            environment=options.environment,
            launcher=self._launcher if sandbox.kind == "none" else FreshProcesses(sandbox.wrap),
        )
        try:
            process.ask("describe")
        except BaseException:
            process.kill()
            process.close()
            raise
        return process


def _package_of(case: Case) -> str:
    return case.kernel.partition(".")[0]

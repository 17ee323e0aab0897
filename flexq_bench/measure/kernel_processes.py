"""Worker processes that run external kernels, while this process judges them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure.external_case import ExternalCase
from flexq_bench.measure.external_kernels import Adopted, options_of
from flexq_bench.measure.judged_kernel import is_defined_elsewhere
from flexq_bench.measure.launcher import FreshProcesses, Launcher, forking_launcher
from flexq_bench.measure.program import WORKER, program_root, sandbox_of
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.sandbox import Kind
from flexq_bench.measure.shared_tensors import Exchange, exchanges
from flexq_bench.measure.tuning import Tuning
from flexq_bench.measure.worker_process import WorkerProcess
from flexq_bench.workloads.case import Case


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


@dataclass(slots=True)
class _Running:
    """A process, and what it shares with this one. group: of cases whose kernels it has loaded."""

    exchange: Exchange
    process: WorkerProcess | None = None
    group: str | None = None

    def end(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


class KernelProcesses:
    """One process at a time, with the kernels of one source; a context manager.

    A process of installed packages has no source. They run in a sandbox where this machine allows
    one; sandbox: its kind, of the latest process. launcher: starts those without a sandbox; None: a
    fork server of its own. A second process judges kernels of operations that the source defines.
    """

    def __init__(
        self, options: ProcessOptions, kernels: Adopted, launcher: Launcher | None = None
    ) -> None:
        self._options = options
        self._source_of = {
            label: source for source, labels in kernels.labels.items() for label in labels
        }
        self.sandbox: Kind = "none"
        with ExitStack() as stack:
            made = stack.enter_context(exchanges("kernel", "reference"))
            self._kernel, self._reference = (_Running(exchange) for exchange in made.values())
            self._launcher = launcher or stack.enter_context(forking_launcher(program_root()))
            self._resources = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is not None:
            for running in (self._kernel, self._reference):
                if running.process is not None:
                    running.process.kill()
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
        worker = self._process_for(case, self._kernel)
        reference = None
        if is_defined_elsewhere(case):
            reference = self._process_for(case, self._reference), self._reference.exchange
        return ExternalCase(
            worker, kernel, case, self._kernel.exchange, device, protocol, reference
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the processes, so that they can't disturb what this one measures."""
        with ExitStack() as stack:
            for running in (self._kernel, self._reference):
                if running.process is not None:
                    stack.enter_context(running.process.paused())
            yield

    def end(self) -> None:
        """End the processes, so that their state does not affect what follows."""
        self._kernel.end()
        self._reference.end()

    def _process_for(self, case: Case, running: _Running) -> WorkerProcess:
        group = self.group_of(case)
        if running.process is None or running.group != group:
            running.end()
            source = self._source_of.get(case.label)
            sources = () if source is None else (source,)
            running.process = self._start(_package_of(case), sources, running.exchange)
            running.group = group
        running.process.allow(self._options.case_s, in_all=True)
        return running.process

    def _start(
        self, name: str, sources: Sequence[KernelSource], exchange: Exchange
    ) -> WorkerProcess:
        options = self._options
        sandbox = sandbox_of(sources, options.environment, exchange=exchange)
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

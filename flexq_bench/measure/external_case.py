"""A case of an external kernel: launched by a worker, judged and sampled by this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.clocks import Batch, Rotation
from flexq_bench.measure.inputs import INPUT_DISTRIBUTION
from flexq_bench.measure.judged_kernel import JudgedKernel, Turn, Worker
from flexq_bench.measure.operation_inputs import OPERATION_DISTRIBUTION, OperationCase
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.worker_process import RefusedError, WorkerError
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload

_SLOT = "run"
_MOST_COPIED = 32 << 20  # bytes, to learn how long a copy takes
_MOST_CHECKED = (16, 128)  # rows and columns of each batch's last launch


class ExternalCase:
    """Counterpart of `PreparedCase`, which is for kernels of this process; measured alike.

    Results are checked on the buffers of placements, where a check looks like any turn. reference:
    see JudgedKernel. Raises RefusedError, WorkerError and what drawing inputs raises.
    """

    def __init__(
        self,
        worker: Worker,
        kernel: LinearKernel,
        case: Case,
        exchange: Exchange,
        device: torch.device,
        protocol: Protocol,
        reference: tuple[Worker, Exchange] | None = None,
    ) -> None:
        self.processes = 2 if reference is None else 3
        self._case, self._device = case, device
        is_linear = case.operation == GemmWorkload.operation
        self.input_distribution = INPUT_DISTRIBUTION if is_linear else OPERATION_DISTRIBUTION
        self._judged = JudgedKernel(
            *(kernel, case, _SLOT, exchange, device, protocol, _MOST_CHECKED),
            None if reference is None else lambda _case: reference,
        )
        self._judged.worker = worker
        self._index: int | None = None  # of the placement that the worker has
        self._launches = 1
        # Ranks write again what launches may change before each sample, as long as these at most.
        self._most_overhead = protocol.max_overhead + (case.gpus > 1)
        self._updated_bytes = 0
        if isinstance(case.workload, OperationWorkload):
            self._updated_bytes = OperationCase(case.workload, kernel.spec).updated_bytes
        self._restoring_s = 0.0  # before each sample
        self._overheads: list[tuple[float, float]] = []
        self.copies = 0
        self.secret = 0
        self.config_values: dict[str, Any] = {}
        self.binary_hash: str | None = None

    def choose_config(self, *_: object) -> None:
        """Use the fastest candidate, by the worker's times and memory."""
        self._prepare(None)

    def use_default(self) -> None:
        """Use the kernel's own heuristic."""
        self._prepare({})

    def _prepare(self, config: dict[str, Any] | None) -> None:
        reply = self._judged.ask(
            "prepare", case=self._case.key, config=config, check=False, shares=True
        )
        self.config_values, self.binary_hash = dict(reply["config"]), reply["binary"]
        self.copies, self.secret = int(reply["copies"]), int(reply["secret"])

    def check(self, when: str) -> CheckResult:
        """Check whole results: before the samples on the first placement, after on the last."""
        if when == "before":
            self._place(0)
        result = self._judged.check_result()
        if not result.is_correct:
            more = self._judged.inspected()  # it may say why
            return replace(result, detail="; ".join(filter(None, (result.detail, more))))
        if when == "before":
            return result
        late = late_samples(self._overheads, self._most_overhead)
        return result.merged(CheckResult(None, None, late))

    @contextmanager
    def placed(self, index: int) -> Iterator[JudgedPlacement]:
        """Placement `index`, which the worker keeps until the next one."""
        self._place(index)
        rotation = JudgedRotation(self._judged, self._launches, self._device, self._restoring_s)
        yield JudgedPlacement(rotation, self._judged)
        self._overheads.extend(rotation.overheads)

    def _place(self, index: int) -> None:
        if self._index != index:
            reply = self._judged.ask("place", index=index, warm_up=False)
            self._index, self._launches = index, int(reply["launches"])
            if restored := min(self._launches, self.copies) * self._updated_bytes:
                self._restoring_s = 2 * _copy_s(restored, self._device)  # or slower

    def close(self) -> None:
        """Free what the worker has of the case."""
        with suppress(RefusedError, WorkerError):  # it may be the reason
            self._judged.ask("release")


class JudgedRotation(Rotation):
    """Launches in a worker. Each batch's last launch has inputs of this process, and is checked.

    Under steady load nothing may interrupt the batches, and the last one's inputs are older.
    restoring_s: to copy what launches change, before each sample.
    """

    def __init__(
        self, judged: JudgedKernel, launches: int, device: torch.device, restoring_s: float
    ) -> None:
        self._judged, self._device, self._restoring_s = judged, device, restoring_s
        self.launches = launches
        self._turns: list[tuple[Turn, float]] = []  # with seconds before samples

    @property
    def overheads(self) -> Iterator[tuple[float, float]]:
        """Time of each sample's turn beside samples and what precedes them, relative to samples.

        Also without the time in which the worker waited for a CPU. As results are medians of
        samples or nearly so, a median over samples tells whether they are too short, and other
        programs that disturb some turns don't count.
        """
        for turn, before_s in self._turns:
            sampled_s = turn.timed_s + turn.untimed_s(self._device)
            whole_s = turn.whole_s - before_s
            shares = whole_s / sampled_s - 1, (whole_s - turn.waited_s) / sampled_s - 1
            yield from [shares] * len(turn.samples_us)

    def sample(self, count: int, *, gap_us: float | None = 0.0) -> Batch:
        is_steady = gap_us is None
        inputs = None if is_steady and self._turns else self._judged.give_inputs()
        turn = self._judged.turn(count=count, gap_us=gap_us or 0.0, steady=is_steady)
        if inputs is not None:
            self._judged.check_of_turn(inputs)()
        gap_s = 0.0 if self._device.type == "cpu" else (gap_us or 0.0) / 1e6
        self._turns.append((turn, (gap_s + self._restoring_s) * (count + turn.kept)))
        return Batch(turn.samples_us, turn.sm_mhz)

    def close(self) -> None:
        """The worker frees its buffers."""


@dataclass(frozen=True, slots=True)
class JudgedPlacement:
    """A placement in a worker."""

    rotation: JudgedRotation
    _judged: JudgedKernel

    def inspect(self) -> str:
        """Describe errors in the results of timed launches; empty: none.

        Those that this process found come first, then what the worker finds in outputs of earlier
        launches, which it kept.
        """
        return "; ".join(filter(None, (self._judged.wrong, self._judged.inspected())))


def late_samples(overheads: Sequence[tuple[float, float]], most: float) -> str:
    """Describe samples that are too short for their turns; empty: they aren't.

    overheads: as of JudgedRotation. Raises WorkerError if most of what is too much was waiting for
    a CPU: nothing is known then, because a kernel could make others wait to hide its own time.
    """
    if not overheads:
        return ""
    overhead, unwaited = map(statistics.median, zip(*overheads, strict=True))
    if overhead <= most:
        return ""
    late = f"its samples leave {overhead:.0%} of their time unaccounted for in the turns that they "
    if unwaited <= max(most, overhead / 2):
        raise WorkerError(
            f"{late}were taken in, most of it waiting for a CPU that others used: not judged, "
            "measure it again when the CPUs are less busy"
        )
    return f"{late}were taken in: its clock is not the device's"


def _copy_s(size: int, device: torch.device) -> float:
    """Seconds to copy so many bytes from one cold buffer of a device to another."""
    part = min(size, _MOST_COPIED)
    target, source = torch.ones(2, part, dtype=torch.uint8, device=device)
    start = _now(device)
    target.copy_(source)
    return (_now(device) - start) * size / part


def _now(device: torch.device) -> float:
    """Seconds when the device has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

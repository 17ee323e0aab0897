"""A kernel that runs in the process of a worker, and whose results are judged by this process.

The worker may have replaced whatever measures in its process. This process therefore draws the
inputs, checks the outputs, and compares the worker's times with its own clock.
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from flexq_bench.kernels.contract import Kernel, KernelSpec, LinearKernel
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.kernels.formats import Operand
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.clocks import draw_kept
from flexq_bench.measure.given_inputs import Parts, named_tensors, parts_of
from flexq_bench.measure.judged_work import (
    Given,
    JudgedLinear,
    JudgedOperation,
    JudgedWork,
    OwnReference,
    Reference,
    Role,
    Seeds,
)
from flexq_bench.measure.protocol import Protocol as MeasuringProtocol
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.work import Outputs
from flexq_bench.measure.worker_process import WorkerError, waited_s
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload, operation

MAX_CLOCK_RATIO = 1.01  # ratio of the clocks of this process and of a device


class Worker(Protocol):
    """Interface of a WorkerProcess; its operations are those of WorkerOperations."""

    secret: int | None

    def reseed(self, secret: int) -> None: ...

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]: ...

    def send(self, what: str, **arguments: Any) -> None: ...

    def receive(self) -> dict[str, Any]: ...

    def paused(self, others: Sequence[Any] = ()) -> AbstractContextManager[None]: ...

    def rescheduled(self) -> str: ...

    def waited_s(self) -> float: ...

    def run_on(self, cpus: Collection[int]) -> None: ...


ReferenceOf = Callable[[Case], tuple[Worker, Exchange]]


@dataclass(frozen=True, slots=True)
class Turn:
    """Samples that a worker took on request; when the request was sent, and when a reply came.

    samples_us: per launch; launches: of a sample. sm_mhz: clocks that the worker read. kept: number
    of samples with kept outputs, which have no times. waited_s: for a CPU that others used.
    """

    samples_us: tuple[float, ...]
    launches: int
    sm_mhz: tuple[float | None, ...]
    kept: int
    began: float
    ended: float
    waited_s: float

    @property
    def whole_s(self) -> float:
        return self.ended - self.began

    @property
    def timed_s(self) -> float:
        return sum(self.samples_us) * self.launches / 1e6

    def untimed_s(self, device: torch.device) -> float:
        """Seconds of the samples without times, each as long as the others.

        These are those whose outputs are kept, and on a GPU one that fills the queue.
        """
        untimed = self.kept + (0 if device.type == "cpu" else 1)
        return untimed * statistics.median(self.samples_us) * self.launches / 1e6


def is_defined_elsewhere(case: Case) -> bool:
    """Return True if a case's operation is known here without the functions of its definition."""
    is_linear = not isinstance(case.workload, OperationWorkload)
    return not is_linear and operation(case.operation).reference is None


class JudgedKernel:
    """A kernel at a case, in a slot of a worker.

    kernel: as this process knows it, with its formats and its required exactness. elements: rows
    and columns of a linear layer's output that are checked after a turn, at most. reference: a
    worker that isn't the kernel's, with its exchange: it draws and judges an operation whose
    definition is in a user's file, which this process doesn't run; None: there is none. wrong: the
    first error; empty: none. failed: the first wrong result, with the seeds of its inputs; None:
    there is none.
    """

    def __init__(
        self,
        kernel: Kernel,
        case: Case,
        slot: str,
        exchange: Exchange,
        device: torch.device,
        protocol: MeasuringProtocol,
        elements: tuple[int, int],
        reference: ReferenceOf | None = None,
    ) -> None:
        self._case, self._slot = case, slot
        self._exchange, self._device = exchange, device
        self._streamed: dict[Worker, Parts] = {}  # those that workers have
        self.worker: Worker | None = None
        self.wrong = ""
        self.failed: tuple[CheckResult, Seeds] | None = None
        # Of the inputs with which workers were given streamed ones, in their placements.
        self._filled: defaultdict[Worker, list[Seeds]] = defaultdict(list)
        self._work: JudgedWork
        if isinstance(case.workload, OperationWorkload):
            judging: Reference
            if not is_defined_elsewhere(case):
                judging = OwnReference(case, kernel.spec, device, protocol.tolerance)
            else:
                assert reference is not None  # as is_defined_elsewhere says
                judging = _OtherReference(case, device, reference)
            self._work = JudgedOperation(case, kernel.spec, judging)
            return
        assert isinstance(kernel, LinearKernel)  # probes have no inputs
        if isinstance(kernel, DescribedKernel) and kernel.has_own_rule:
            kernel = _OwnRule(kernel.spec, self._quantized)
        self._work = JudgedLinear(kernel, case, device, protocol.tolerance, elements)

    def begin_place(self, worker: Worker) -> None:
        """Draw all inputs anew for a placement of a worker."""
        self.forget_weights()
        self._filled.pop(worker, None)

    def forget_weights(self) -> None:
        """Draw new weights, and whatever else is streamed, with the next inputs."""
        self._work.forget()
        self._streamed.clear()

    def give_weights(self, workers: Sequence[Worker]) -> bool:
        """Give the weights to several workers at once, unless they are drawn with other inputs.

        They hold them until they are given others.
        """
        streamed = self._work.streamed()
        if streamed is None:
            return False
        tensors, plain = named_tensors(streamed)
        layout, path = self._exchange.give(tensors), str(self._exchange.inputs)
        for worker in workers:
            worker.send("hold", slot=self._slot, path=path, layout=layout, plain=plain)
        for worker in workers:
            worker.receive()
        self._streamed = dict.fromkeys(workers, streamed)
        return True

    def give_inputs(self, meanwhile: Callable[[], None] = lambda: None) -> Given:
        """Give inputs that no worker can predict: new fresh ones, and streamed ones if it has none.

        meanwhile: called while the worker takes them. Raises WorkerError if it takes none.
        """
        given = self._work.draw()
        self.note(self._noted(CheckResult(None, None, given.wrong), given.seeds))
        self._fill(given, meanwhile)
        return given

    def _quantized(self, operand: str, real: torch.Tensor) -> Operand:
        """Let the worker quantize by its kernel's own rule."""
        layout = self._exchange.give({"real": real})
        paths = {"path": str(self._exchange.inputs), "out": str(self._exchange.outputs)}
        reply = self.ask("quantize", layout=layout, operand=operand, **paths)
        parts = _taken(self._exchange, reply, self._device, self._case)
        part = parts.get(operand)
        if not isinstance(part, Operand):
            raise WorkerError(f"{self._case.label}: what a worker quantized is no operand")
        return part

    def _fill(self, given: Given, meanwhile: Callable[[], None] = lambda: None) -> None:
        assert self.worker is not None  # it was prepared
        is_new = given.streamed is not self._streamed.get(self.worker)
        if is_new or not self._filled[self.worker]:  # a worker may hold them
            self._filled[self.worker].append(given.seeds)
        tensors, plain = named_tensors({**given.fresh, **(given.streamed if is_new else {})})
        layout = self._exchange.give(tensors)
        path = str(self._exchange.inputs)
        self.worker.send(
            "fill", slot=self._slot, path=path, layout=layout, plain=plain, weights=is_new
        )
        try:
            meanwhile()
        finally:
            self.worker.receive()
        self._streamed[self.worker] = given.streamed

    def turn(self, *, count: int | None = None, **arguments: Any) -> Turn:
        """Let the worker take `count` samples; None: as many as it says.

        Raises WorkerError if it reports no times.
        """
        kept = draw_kept(secrets.SystemRandom())  # a worker could say too many, to hide time
        waited_s, began = self._waited_s(), time.perf_counter()
        reply = self.ask("turn", kept=kept, count=count, **arguments)
        ended = time.perf_counter()
        turn = self._read(reply, kept, began, ended, self._waited_s() - waited_s)
        if count is not None and len(turn.samples_us) != count:
            self.note(f"it reported {len(turn.samples_us)} of {count} samples")
        if turn.timed_s > MAX_CLOCK_RATIO * turn.whole_s:
            self.note(
                f"its samples add up to {1e3 * turn.timed_s:.3g} ms in a turn of "
                f"{1e3 * turn.whole_s:.3g} ms: its clock is not the device's"
            )
        return turn

    def _read(
        self, reply: dict[str, Any], kept: int, began: float, ended: float, waited_s: float
    ) -> Turn:
        try:
            samples = tuple(float(sample) for sample in reply["samples_us"])
            launches = int(reply["launches"])
            clocks = tuple(None if mhz is None else float(mhz) for mhz in reply["sm_mhz"])
        except (KeyError, TypeError, ValueError, OverflowError):
            samples, launches, clocks = (), 0, ()
        if (
            not samples
            or launches < 1
            or not all(0 < sample < math.inf for sample in samples)
            or len(clocks) != len(samples)
        ):
            raise WorkerError(f"{self._case.label}: a worker reported no times for its turn")
        return Turn(samples, launches, clocks, kept, began, ended, waited_s)

    def check_of_turn(self, given: Given) -> Callable[[], None]:
        """Take outputs of the latest launch, which had these inputs; return what checks them."""
        if not self._work.is_checked():
            return lambda: None
        outputs = self._outputs()

        def check() -> None:
            found = self._work.judge(given, outputs)
            if found.detail:
                found = replace(found, detail=f"wrong in a timed turn: {found.detail}")
            self.note(self._noted(found, given.seeds))

        return check

    def check_result(self) -> CheckResult:
        """Check whole results on the timed buffers, bit for bit where required."""
        found, seeds = self._work.check(self._run)
        self._noted(found, seeds)
        return found

    def repeat(self, seeds: Seeds) -> CheckResult:
        """Check results on the timed buffers, on inputs that were drawn before."""
        return self._work.repeat(seeds, self._run)

    def give_again(self, seeds: Seeds) -> None:
        """Give inputs of a turn that were given before."""
        self._fill(self._work.given(seeds))

    def seeds_given(self, worker: Worker, index: int) -> Seeds | None:
        """Seeds with which streamed inputs came to a worker's placement; None: not so many did."""
        return next(iter(self._filled[worker][index : index + 1]), None)

    def _run(self, given: Given) -> Outputs:
        self._fill(given)
        self.ask("turn", count=1, kept=0)
        return self._outputs()

    def inspected(self) -> str:
        """Errors that the worker finds in outputs that it kept; empty: none, or so it says."""
        return str(self.ask("inspect")["wrong"])

    def _waited_s(self) -> float:
        """Seconds that this process and the worker have waited for CPUs that others used."""
        assert self.worker is not None  # it was prepared
        return waited_s(os.getpid()) + self.worker.waited_s()

    def note(self, wrong: str) -> None:
        """Keep the first error."""
        self.wrong = self.wrong or wrong

    def _noted(self, found: CheckResult, seeds: Seeds) -> str:
        """Keep the first wrong result; return what is wrong with this one."""
        if found.detail and self.failed is None:
            self.failed = found, seeds
        return found.detail

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self.worker is not None  # it was prepared
        return self.worker.ask(what, slot=self._slot, **arguments)

    def _outputs(self) -> dict[str, torch.Tensor]:
        self.ask("output", path=str(self._exchange.outputs))
        try:
            outputs = self._exchange.take(self._work.layout)
        except (OSError, ValueError) as error:
            raise WorkerError(f"{self._case.label}: a worker gave no output: {error}") from None
        return {name: output.to(self._device) for name, output in outputs.items()}


class _OtherReference:
    """The reference of a definition that another worker has, and this process does not."""

    def __init__(
        self,
        case: Case,
        device: torch.device,
        place: ReferenceOf,
    ) -> None:
        self._case, self._device, self._place = case, device, place

    def draw(self, role: Role, seed: int) -> Parts:
        worker, exchange = self._place(self._case)
        out = str(exchange.outputs)
        reply = worker.ask("draw", case=self._case.key, role=role, seed=seed, out=out)
        return _taken(exchange, reply, self._device, self._case)

    def judge(self, streamed: int, fresh: int, outputs: Outputs) -> CheckResult:
        worker, exchange = self._place(self._case)
        layout, path = exchange.give(outputs), str(exchange.inputs)
        seeds = {"streamed": streamed, "fresh": fresh}
        reply = worker.ask("judge", case=self._case.key, layout=layout, path=path, **seeds)
        return CheckResult(reply["max_rel_error"], reply["exact"], str(reply["wrong"]))


def _taken(
    exchange: Exchange, reply: Mapping[str, Any], device: torch.device, case: Case
) -> dict[str, torch.Tensor | Operand]:
    """The parts that a worker wrote. Raises WorkerError if they are none."""
    try:
        tensors = exchange.take(reply["layout"])
        return parts_of({n: tensor.to(device) for n, tensor in tensors.items()}, reply["plain"])
    except (KeyError, TypeError, ValueError, OSError, ShapeError) as error:
        raise WorkerError(f"{case.label}: what a worker made is no operand: {error}") from None


class _OwnRule(DescribedKernel):
    """Quantizes in the worker. quantized(operand, real): does so for "x" or "w"."""

    def __init__(self, spec: KernelSpec, quantized: Callable[[str, torch.Tensor], Operand]) -> None:
        super().__init__(spec, has_own_rule=True)
        self._quantized = quantized

    def quantize_weight(self, weight: torch.Tensor) -> Operand:
        return self._quantized("w", weight)

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return self._quantized("x", x)

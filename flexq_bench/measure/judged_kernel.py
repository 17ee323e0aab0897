"""A kernel that runs in the process of a worker, and whose results are judged by this process.

The worker may have replaced whatever measures in its process. This process therefore draws the
inputs, checks the outputs, and compares the worker's times with its own clock.
"""

from __future__ import annotations

import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flexq_bench.kernels.contract import KernelSpec, LinearKernel
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.external.described import DescribedKernel
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import reference_of
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import CheckResult, check_linear, judge_error
from flexq_bench.measure.clocks import draw_kept
from flexq_bench.measure.given_inputs import named_tensors
from flexq_bench.measure.inputs import (
    LinearInputs,
    real_weight,
    realistic_inputs,
    realistic_weight,
)
from flexq_bench.measure.own_quantization import has_own_rule, own_quantization_error
from flexq_bench.measure.protocol import Protocol as MeasuringProtocol
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.worker_process import WorkerError, waited_s
from flexq_bench.workloads.case import Case

MAX_CLOCK_RATIO = 1.01  # ratio of the clocks of this process and of a device


class Worker(Protocol):
    """Interface of a WorkerProcess; its operations are those of WorkerOperations."""

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]: ...

    def send(self, what: str, **arguments: Any) -> None: ...

    def receive(self) -> dict[str, Any]: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def rescheduled(self) -> str: ...

    def waited_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Turn:
    """Samples that a worker took on request; when the request was sent, and when a reply came.

    samples_us: per launch; launches: of a sample. sm_mhz: clocks that the worker read. kept: number
    of samples with kept outputs, which have no times.
    """

    samples_us: tuple[float, ...]
    launches: int
    sm_mhz: tuple[float | None, ...]
    kept: int
    began: float
    ended: float

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


class JudgedKernel:
    """A kernel at a case, in a slot of a worker.

    kernel: as this process knows it, with its formats and its required exactness. elements: rows
    and columns of a turn's output that are checked, at most. wrong: the first error; empty: none.
    waits_s: time in which either process waited for a CPU during each message besides turns.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        case: Case,
        slot: str,
        exchange: Exchange,
        device: torch.device,
        protocol: MeasuringProtocol,
        elements: tuple[int, int],
    ) -> None:
        has_own_rule = isinstance(kernel, DescribedKernel) and kernel.has_own_rule
        self._kernel = _OwnRule(kernel.spec, self._quantized) if has_own_rule else kernel
        self._case, self._slot = case, slot
        self._exchange, self._device, self._protocol = exchange, device, protocol
        self._elements = elements
        self._weights: Operand | None = None  # of turns, drawn from this seed
        self._seed = 0
        self._given: Operand | None = None  # those that the worker has
        self.worker: Worker | None = None
        self.wrong = ""
        self.waits_s: list[float] = []

    def forget_weights(self) -> None:
        """Draw new weights with the next inputs."""
        self._weights = None

    def give_inputs(self) -> LinearInputs:
        """Give inputs that no worker can predict: new activations, and weights if it has none."""
        gemm = self._case.gemm
        kernel, device = self._kernel, self._device
        if self._weights is None:
            self._seed = new_seed()
            self._weights = realistic_weight(kernel, gemm.n, gemm.k, device, self._seed)
        inputs = realistic_inputs(kernel, gemm, device, new_seed(), w=self._weights)
        if has_own_rule(kernel):
            w_real = real_weight(gemm.n, gemm.k, device, self._seed)
            self.note(own_quantization_error(kernel, inputs, w_real, new_seed()))
        self._fill(inputs)
        return inputs

    def _quantized(self, operand: str, real: torch.Tensor) -> Operand:
        """Let the worker quantize by its kernel's own rule."""
        layout = self._exchange.give({"real": real})
        paths = {"path": str(self._exchange.inputs), "out": str(self._exchange.outputs)}
        reply = self.ask("quantize", layout=layout, operand=operand, **paths)
        try:
            found = self._exchange.take(reply["layout"])
            parts = {name: tensor.to(self._device) for name, tensor in found.items()}
            return Operand(**{**reply["plain"], **parts})
        except (KeyError, TypeError, ValueError, OSError, ShapeError) as error:
            raise WorkerError(
                f"{self._case.label}: what a worker quantized is no operand: {error}"
            ) from None

    def _fill(self, inputs: LinearInputs) -> None:
        tensors, plain = named_tensors(inputs, weights=inputs.w is not self._given)
        layout = self._exchange.give(tensors)
        with self._noting_waits():
            self.ask("fill", path=str(self._exchange.inputs), layout=layout, plain=plain)
        self._given = inputs.w

    def turn(self, **arguments: Any) -> Turn:
        """Let the worker take samples. Raises WorkerError if it reports no times."""
        kept = draw_kept(secrets.SystemRandom())  # a worker could say too many, to hide time
        began = time.perf_counter()
        reply = self.ask("turn", kept=kept, **arguments)
        ended = time.perf_counter()
        turn = self._read(reply, kept, began, ended)
        if turn.timed_s > MAX_CLOCK_RATIO * turn.whole_s:
            self.note(
                f"its samples add up to {1e3 * turn.timed_s:.3g} ms in a turn of "
                f"{1e3 * turn.whole_s:.3g} ms: its clock is not the device's"
            )
        return turn

    def _read(self, reply: dict[str, Any], kept: int, began: float, ended: float) -> Turn:
        try:
            samples = tuple(float(sample) for sample in reply["samples_us"])
            launches = int(reply["launches"])
            clocks = tuple(None if mhz is None else float(mhz) for mhz in reply["sm_mhz"])
        except (KeyError, TypeError, ValueError):
            samples, launches, clocks = (), 0, ()
        if (
            not samples
            or launches < 1
            or not all(0 < sample < math.inf for sample in samples)
            or len(clocks) != len(samples)
        ):
            raise WorkerError(f"{self._case.label}: a worker reported no times for its turn")
        return Turn(samples, launches, clocks, kept, began, ended)

    def check_cells(self, inputs: LinearInputs) -> None:
        """Check elements of the latest launch's output, which are chosen now."""
        output, gemm = self._output(), self._case.gemm
        rows, columns = (
            self._chosen(count, most)
            for count, most in zip((gemm.m, gemm.n), self._elements, strict=True)
        )
        spec = self._kernel.spec
        reference = reference_of(spec, inputs.x.take_rows(rows), inputs.w.take_rows(columns))
        wrong = judge_error(output[rows][:, columns], reference, self._protocol.tolerance)
        if wrong.detail:
            self.note(f"wrong in a timed turn: {wrong.detail}")

    def check_result(self) -> CheckResult:
        """Check whole results on the timed buffers, bit for bit where required."""

        def run(inputs: LinearInputs, out: torch.Tensor) -> None:
            self._fill(inputs)
            self.ask("turn", count=1)
            out.copy_(self._output())

        bound = BoundKernel(self._kernel, self._kernel.spec, self._case, self._device)
        return check_linear(bound, run, seed=new_seed(), tolerance=self._protocol.tolerance)

    def inspected(self) -> str:
        """Errors that the worker finds in outputs that it kept; empty: none, or so it says."""
        return str(self.ask("inspect")["wrong"])

    def note(self, wrong: str) -> None:
        """Keep the first error."""
        self.wrong = self.wrong or wrong

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        assert self.worker is not None  # it was prepared
        return self.worker.ask(what, slot=self._slot, **arguments)

    @contextmanager
    def _noting_waits(self) -> Iterator[None]:
        assert self.worker is not None  # it was prepared
        before_s = self.worker.waited_s() + waited_s()
        yield
        self.waits_s.append(self.worker.waited_s() + waited_s() - before_s)

    def _output(self) -> torch.Tensor:
        gemm = self._case.gemm
        with self._noting_waits():
            self.ask("output", path=str(self._exchange.outputs))
        try:
            dtype = str(self._kernel.spec.output_dtype).removeprefix("torch.")
            output = self._exchange.take([("out", dtype, (gemm.m, gemm.n))])["out"]
        except (OSError, ValueError) as error:
            raise WorkerError(f"{self._case.label}: a worker gave no output: {error}") from None
        return output.to(self._device)

    def _chosen(self, count: int, most: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(new_seed())
        chosen = torch.randperm(count, generator=generator)[:most].sort().values
        return chosen.to(self._device)


class _OwnRule(DescribedKernel):
    """Quantizes in the worker. quantized(operand, real): does so for "x" or "w"."""

    def __init__(self, spec: KernelSpec, quantized: Callable[[str, torch.Tensor], Operand]) -> None:
        super().__init__(spec, has_own_rule=True)
        self._quantized = quantized

    def quantize_weight(self, weight: torch.Tensor) -> Operand:
        return self._quantized("w", weight)

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        return self._quantized("x", x)


def new_seed() -> int:
    """A seed that nobody can predict."""
    return secrets.randbits(62)

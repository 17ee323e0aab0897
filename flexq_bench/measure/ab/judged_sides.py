"""A side of a comparison with an untrusted worker: results and times are checked by this process.

The worker runs code of a pull request, which may have replaced the meter in its process. This
process therefore draws the inputs of each turn, checks the outputs, reads the device's clock, and
compares the worker's times with its own clock.
"""

from __future__ import annotations

import math
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from flexq_bench.kernels.contract import LinearKernel
from flexq_bench.kernels.reference import reference_of
from flexq_bench.kernels.registry import resolve
from flexq_bench.measure.ab.blocks import CasePair, CaseSide, SampleBatch, Worker
from flexq_bench.measure.ab.given_inputs import read_output, write_inputs
from flexq_bench.measure.ab.unchanged_files import UnchangedFiles
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import check_linear, judge_error
from flexq_bench.measure.clocks import draw_kept
from flexq_bench.measure.device import find_device
from flexq_bench.measure.inputs import LinearInputs, realistic_inputs
from flexq_bench.measure.nvml import open_handle
from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA, Protocol
from flexq_bench.measure.sandbox import Kind, Sandbox
from flexq_bench.measure.telemetry import NoSensor, NvmlSensor, Sensor, Telemetry
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

# Checked elements of each turn's output: a kernel that leaves out 1 % of the columns passes one
# turn in a hundred thousand.
_MAX_CHECKED_ROWS, _MAX_CHECKED_COLUMNS = 64, 1024
# Part of a turn by which head's overhead may exceed base's: nearly all honest turns differ by less,
# in spite of the scheduler.
MAX_EXCESS_OVERHEAD = 0.05
_MAX_P_VALUE = 1e-3
_MIN_TURNS = 12
_MAX_CLOCK_RATIO = 1.01  # ratio of the clocks of this process and of a GPU
# One in this many placements, drawn at random, has its whole result checked, and so has the first.
# This takes longer than the placement's samples, of which some elements are always checked.
_PLACEMENTS_PER_WHOLE_CHECK = 4


@dataclass(frozen=True, slots=True)
class JudgingDevice:
    """Device, protocol and sensor to judge with.

    folder: private, for files to and from workers. files: those that no worker may change, where no
    sandbox protects them.
    """

    device: torch.device
    protocol: Protocol
    sensor: Sensor
    folder: Path
    files: UnchangedFiles | None = None

    @property
    def untimed_samples(self) -> int:
        """Number of samples of a turn without a time, beside those whose outputs are kept: on a GPU
        one fills the queue.
        """
        return 0 if self.device.type == "cpu" else 1

    def exchange(self, slot: str) -> Exchange:
        """The files of a side: an empty one for outputs. In a sandbox it has no others' files."""
        folder = self.folder / slot
        folder.mkdir(exist_ok=True)
        output = folder / "output"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(output, flags)
        except OSError:  # a worker without a sandbox may have put a link in its place
            output.unlink()
            descriptor = os.open(output, flags)
        os.fchmod(descriptor, 0o666)  # in a sandbox, the worker is another user
        os.close(descriptor)
        return Exchange(folder, output)

    def sandbox(
        self, slot: str, kind: Kind, environment: Mapping[str, str], folders: Sequence[Path]
    ) -> Sandbox:
        """The sandbox of a side's workers, which see these folders."""
        exchange = self.exchange(slot)
        return Sandbox(environment, kind, (*folders, exchange.inputs), (exchange.output,))

    def telemetry(self) -> Telemetry:
        return Telemetry(self.sensor, period_s=self.protocol.telemetry_period_s)

    def kernel_of(self, case: Case) -> LinearKernel:
        """The kernel as this program knows it, with its formats and its required exactness."""
        kernel = resolve(case.label, "cpu" if self.device.type == "cpu" else "cuda")
        assert isinstance(kernel, LinearKernel)  # probes have no inputs, and run base's code
        return kernel


@dataclass(frozen=True, slots=True)
class Exchange:
    """Folder with the inputs of a worker, and the file for its outputs, which exists."""

    inputs: Path
    output: Path


@contextmanager
def judging_device(name: str) -> Iterator[JudgingDevice]:
    """The judging device of this name. Raises DeviceError if this machine has none."""
    device = find_device(name)
    is_cpu = device.type == "cpu"
    nvml = None if is_cpu else open_handle(device)
    sensor = NvmlSensor(nvml) if nvml else NoSensor()
    with tempfile.TemporaryDirectory() as folder:
        yield JudgingDevice(device, PROTOCOL_CPU if is_cpu else PROTOCOL_CUDA, sensor, Path(folder))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn's number of samples with kept outputs, seconds outside of samples, and in all."""

    kept: int
    overhead_s: float
    whole_s: float


@dataclass
class JudgedSide(CaseSide):
    """A side whose results are judged here. Its worker runs the timed launches.

    opponent: the other side, whose worker is stopped during this one's turns. is_trusted: True for
    the side whose times are the reference. believes_binary: True if the worker's hash of the
    machine code is accepted. turns: those measured so far.
    """

    judge: JudgingDevice = field(kw_only=True)
    believes_binary: bool = field(default=True, kw_only=True)
    is_trusted: bool = field(default=False, kw_only=True)
    opponent: JudgedSide | None = field(default=None, kw_only=True, repr=False, compare=False)
    turns: list[_Turn] = field(default_factory=list, kw_only=True)
    _worker: Worker | None = field(default=None, init=False)
    _weights: LinearInputs | None = field(default=None, init=False)
    _is_checked: bool = field(default=False, init=False)  # True if the whole result is checked

    def begin_prepare(self, worker: Worker, favourite: dict[str, Any] | None) -> None:
        self._worker = worker
        super().begin_prepare(worker, favourite)

    def end_prepare(self, worker: Worker) -> None:
        super().end_prepare(worker)
        if not self.believes_binary:
            self.binary = None

    def place(self, worker: Worker, index: int, beside: str | None) -> None:
        super().place(worker, index, beside)
        self._weights = None

    def sample(self, worker: Worker) -> SampleBatch:
        inputs = self._draw()
        self._fill(worker, inputs, weights=self._weights is None)
        self._weights = self._weights or inputs
        turn = self._timed(worker)
        wrong = self._wrong_cells(inputs, self._output(worker))
        self.wrong = self.wrong or wrong
        return turn

    def leave(self, worker: Worker) -> None:
        if not self._is_checked or secrets.randbelow(_PLACEMENTS_PER_WHOLE_CHECK) == 0:
            self.wrong = self.wrong or self._wrong_result(worker)
            self._is_checked = True
        super().leave(worker)
        if self.opponent is not None and not self.is_trusted:
            self.wrong = (
                self.wrong
                or _unaccounted(self.turns, self.opponent.turns)
                or _rescheduled(self.opponent)
                or self._changed_files()
            )

    def _changed_files(self) -> str:
        files = self.judge.files
        changed = files.first_changed() if files is not None else ""
        return f"{changed} changed while its code ran: no times are believed" if changed else ""

    def _draw(self) -> LinearInputs:
        """Draw inputs that no worker can predict: new activations, and the placement's weights."""
        kernel, gemm = self.judge.kernel_of(self.case), self.case.gemm
        if self._weights is None:
            return realistic_inputs(kernel, gemm, self.judge.device, _seed())
        one_row = GemmWorkload(gemm.m, 1, gemm.k)
        drawn = realistic_inputs(kernel, one_row, self.judge.device, _seed())
        return replace(drawn, w=self._weights.w)

    def _fill(self, worker: Worker, inputs: LinearInputs, *, weights: bool) -> None:
        path = self.judge.exchange(self.slot).inputs / f"inputs-{secrets.token_hex(8)}"
        # Unchanged weights need not be written again.
        write_inputs(path, inputs if weights else replace(inputs, w=inputs.w.slice_rows(0, 1)))
        path.chmod(0o644)
        worker.ask("fill", slot=self.slot, path=str(path), weights=weights)
        path.unlink(missing_ok=True)

    def _timed(self, worker: Worker) -> SampleBatch:
        with ExitStack() as stack:
            other = None if self.opponent is None else self.opponent._worker
            if other is not None and other is not worker:
                stack.enter_context(other.paused())
            telemetry = stack.enter_context(self.judge.telemetry())
            kept = draw_kept(secrets.SystemRandom())  # a worker could say too many, to hide time
            began = time.perf_counter()
            # During a gap a worker could do work that its samples leave out.
            reply = worker.ask("turn", slot=self.slot, gap_us=0.0, kept=kept)
            ended = time.perf_counter()
            telemetry.note(began, ended)
        samples, launches = self._read_reply(reply)
        whole_s, timed_s = ended - began, sum(samples) * launches / 1e6
        if timed_s > _MAX_CLOCK_RATIO * whole_s:
            self.wrong = self.wrong or (
                f"its samples add up to {1e3 * timed_s:.3g} ms in a turn of "
                f"{1e3 * whole_s:.3g} ms: its clock is not the device's"
            )
        untimed = self.judge.untimed_samples + kept
        untimed_s = untimed * statistics.median(samples) * launches / 1e6
        self.turns.append(_Turn(kept, whole_s - timed_s - untimed_s, whole_s))
        state = telemetry.summary()
        return SampleBatch(samples, state.sm_clock_mhz, True, self.judge.protocol.trim)

    def _read_reply(self, reply: dict[str, Any]) -> tuple[tuple[float, ...], int]:
        """Samples in microseconds per launch, and the launches of a sample."""
        try:
            samples = tuple(float(sample) for sample in reply["samples_us"])
            launches = int(reply["launches"])
        except (KeyError, TypeError, ValueError):
            samples, launches = (), 0
        if not samples or launches < 1 or not all(0 < s < math.inf for s in samples):
            raise WorkerError(f"{self.case.label}: a worker reported no times for its turn")
        return samples, launches

    def _output(self, worker: Worker) -> torch.Tensor:
        path = self.judge.exchange(self.slot).output
        worker.ask("output", slot=self.slot, path=str(path))
        try:
            output = read_output(path, self.case.gemm.m, self.case.gemm.n)
        except (OSError, ValueError) as error:
            raise WorkerError(f"{self.case.label}: a worker gave no output: {error}") from None
        finally:
            self.judge.exchange(self.slot)
        return output.to(self.judge.device)

    def _wrong_cells(self, inputs: LinearInputs, output: torch.Tensor) -> str:
        """Check output elements that are chosen now. Return a description of errors, or ""."""
        gemm = self.case.gemm
        rows, columns = (
            self._sample_indices(gemm.m, _MAX_CHECKED_ROWS),
            self._sample_indices(gemm.n, _MAX_CHECKED_COLUMNS),
        )
        spec = self.judge.kernel_of(self.case).spec
        reference = reference_of(spec, inputs.x.take_rows(rows), inputs.w.take_rows(columns))
        wrong = judge_error(output[rows][:, columns], reference, self.judge.protocol.tolerance)
        return f"wrong in a timed turn: {wrong.detail}" if wrong.detail else ""

    def _wrong_result(self, worker: Worker) -> str:
        """Check the result on the timed buffers, bit for bit where required; empty: correct."""

        def run(inputs: LinearInputs, out: torch.Tensor) -> None:
            self._fill(worker, inputs, weights=True)
            worker.ask("turn", slot=self.slot)
            out.copy_(self._output(worker))

        kernel = self.judge.kernel_of(self.case)
        bound = BoundKernel(kernel, kernel.spec, self.case, self.judge.device)
        tolerance = self.judge.protocol.tolerance
        return check_linear(bound, run, seed=_seed(), tolerance=tolerance).detail

    def _sample_indices(self, count: int, most: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_seed())
        chosen = torch.randperm(count, generator=generator)[:most].sort().values
        return chosen.to(self.judge.device)


def judged_pair(base: Case, head: Case, judge: JudgingDevice, *, believes_binary: bool) -> CasePair:
    """A pair of cases judged by this process, with head's times relative to base's."""
    first = JudgedSide("base", base, judge=judge, is_trusted=True)
    second = JudgedSide("head", head, judge=judge, believes_binary=believes_binary, opponent=first)
    first.opponent = second
    return CasePair(first, second)


def _rescheduled(base: JudgedSide) -> str:
    """Describe that the worker of a trusted side was slowed down; empty: it was not."""
    changed = base._worker.rescheduled() if base._worker is not None else ""
    return f"the {changed} of base's process changed while it was measured" if changed else ""


def _unaccounted(head: Sequence[_Turn], base: Sequence[_Turn]) -> str:
    """Describe errors of head's times; empty: none.

    A turn consists of its samples, one after the other, and of an overhead, which is base's code on
    both sides. Head's samples are too short if the overhead of its turns is larger. Keeping outputs
    takes time, so turns with as many kept samples are compared.
    """
    usual_s = {
        kept: statistics.median(turn.overhead_s for turn in base if turn.kept == kept)
        for kept in {turn.kept for turn in base}
    }
    excess = [
        (turn.overhead_s - usual_s[turn.kept]) / turn.whole_s
        for turn in head
        if turn.kept in usual_s
    ]
    if len(excess) < _MIN_TURNS:
        return ""
    over = sum(share > MAX_EXCESS_OVERHEAD for share in excess)
    # Binomial: if turns are above and below it equally often, so many above have this small
    # probability.
    chance = sum(math.comb(len(excess), k) for k in range(over, len(excess) + 1))
    if chance > _MAX_P_VALUE * 2 ** len(excess):
        return ""
    return (
        f"its samples leave {statistics.median(excess):.0%} more of its turns unaccounted for than "
        f"base's do, in {over} of {len(excess)}: its clock is not the device's"
    )


def _seed() -> int:
    return secrets.randbits(62)

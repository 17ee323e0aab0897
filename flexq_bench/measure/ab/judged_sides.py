"""A side of a comparison with an untrusted worker: results and times are checked by this process.

The worker runs code of a pull request, which may have replaced the meter in its process. This
process therefore draws the inputs of each turn, checks the outputs, reads the device's clock, and
compares the worker's times with its own clock.
"""

from __future__ import annotations

import math
import secrets
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from flexq_bench.kernels.contract import Kernel
from flexq_bench.kernels.registry import resolve
from flexq_bench.measure.ab.blocks import CasePair, CaseSide, FailedInputs, SampleBatch
from flexq_bench.measure.ab.unchanged_files import UnchangedFiles
from flexq_bench.measure.clocks import CpuClock
from flexq_bench.measure.device import find_device
from flexq_bench.measure.judged_kernel import JudgedKernel, ReferenceOf, Worker
from flexq_bench.measure.nvml import open_handle
from flexq_bench.measure.protocol import PROTOCOL_CPU, PROTOCOL_CUDA, Protocol
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.telemetry import NoSensor, Sensor, SmClockSensor, Telemetry
from flexq_bench.workloads.case import Case

# Checked elements of each turn's output: a kernel that leaves out 1 % of the columns passes one
# turn in 13, and the twenty turns of the shortest comparison once in 10^22.
_MOST_CHECKED = (64, 256)  # rows and columns
_MAX_P_VALUE = 1e-3
_MIN_TURNS = 12
# In one of this many placements, drawn at random, and in the first, the worker looks at what it
# kept, and head's whole result is checked. This takes longer than the placement's samples, of which
# some elements are always checked.
_PLACEMENTS_PER_WHOLE_CHECK = 8


@dataclass(frozen=True, slots=True)
class JudgingDevice:
    """Device, protocol and sensor to judge with.

    exchanges: shared memory of the sides, by slot. files: those that no worker may change, where no
    sandbox protects them. reference: see JudgedKernel. overdue: checks of turns, which run while a
    worker takes the inputs of the next one.
    """

    device: torch.device
    protocol: Protocol
    sensor: Sensor
    exchanges: Mapping[str, Exchange]
    files: UnchangedFiles | None = None
    reference: ReferenceOf | None = None
    overdue: list[Callable[[], None]] = field(default_factory=list)

    def catch_up(self) -> None:
        while self.overdue:
            self.overdue.pop()()

    def telemetry(self) -> Telemetry:
        return Telemetry(self.sensor, period_s=self.protocol.telemetry_period_s)

    def kernel_of(self, case: Case) -> Kernel:
        """The kernel as this program knows it, with its formats and its required exactness."""
        return resolve(case.label, "cpu" if self.device.type == "cpu" else "cuda")


@contextmanager
def judging_device(name: str, exchanges: Mapping[str, Exchange]) -> Iterator[JudgingDevice]:
    """The judging device of this name. Raises DeviceError if this machine has none."""
    device = find_device(name)
    is_cpu = device.type == "cpu"
    nvml = None if is_cpu else open_handle(device)
    sensor = SmClockSensor(nvml) if nvml else NoSensor()
    # On a CPU, results are small, and more threads than idle cores wait for each other.
    with CpuClock().device_guard() if is_cpu else nullcontext():
        protocol = PROTOCOL_CPU if is_cpu else PROTOCOL_CUDA
        yield JudgingDevice(device, protocol, sensor, exchanges)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn: numbers of timed samples and of kept outputs, seconds beside samples, and in all."""

    samples: int
    kept: int
    overhead_s: float
    whole_s: float


@dataclass
class JudgedSide(CaseSide):
    """A side whose results are judged here. Its worker runs the timed launches.

    opponent: the other side. others: workers that are stopped during this one's turns. is_trusted:
    True for the side whose times are the reference. believes_binary: True if the worker's hash of
    the machine code is accepted. turns: those measured so far.
    """

    judge: JudgingDevice = field(kw_only=True)
    believes_binary: bool = field(default=True, kw_only=True)
    is_trusted: bool = field(default=False, kw_only=True)
    opponent: JudgedSide | None = field(default=None, kw_only=True, repr=False, compare=False)
    turns: list[_Turn] = field(default_factory=list, kw_only=True)
    others: Sequence[Worker] = field(default=(), kw_only=True, repr=False, compare=False)
    _is_checked: bool = field(default=False, init=False)  # True after the first placement
    _is_drawn: bool = field(default=True, init=False)  # True if the current one is checked
    _has_weights: bool = field(default=False, init=False)  # True if workers hold those to use

    @cached_property
    def kernel(self) -> JudgedKernel:
        """Used after a worker has accepted the case: this process may know no such kernel."""
        judge = self.judge
        exchange = judge.exchanges[self.slot]
        return JudgedKernel(
            *(judge.kernel_of(self.case), self.case, self.slot, exchange, judge.device),
            *(judge.protocol, _MOST_CHECKED, judge.reference),
        )

    def begin_prepare(
        self,
        worker: Worker,
        favourite: dict[str, Any] | None,
        *,
        check: bool = True,
        shares: bool = False,
    ) -> None:
        self.kernel.worker = worker
        self.repeats = False
        super().begin_prepare(worker, favourite, check=check, shares=shares)

    def end_prepare(self, worker: Worker) -> None:
        super().end_prepare(worker)
        if not self.believes_binary:
            self.binary = None

    def _note_check(self, reply: Mapping[str, Any]) -> None:
        known = self.judge.kernel_of(self.case).spec.format_names
        declared = reply.get("formats") or known  # workers of earlier commits don't tell
        others = [
            f"{name} {declared.get(name)} instead of {number}"
            for name, number in known.items()
            if declared.get(name) != number
        ]
        if others:
            self.note(f"declares {' and '.join(others)}: give such a kernel another name")
        super()._note_check(reply)

    def begin_place(
        self, worker: Worker, index: int, beside: str | None, *, is_warm: bool = False
    ) -> None:
        super().begin_place(worker, index, beside, is_warm=is_warm)
        self.kernel.begin_place(worker)
        self._has_weights = False

    def give_weights(self, workers: Sequence[Worker]) -> None:
        self._has_weights = self.kernel.give_weights(workers)

    def use(self, worker: Worker, others: Sequence[Worker]) -> None:
        self.kernel.worker, self.others = worker, others
        if not self._has_weights:
            self.kernel.forget_weights()

    def sample(self, worker: Worker) -> SampleBatch:
        inputs = self.kernel.give_inputs(self.judge.catch_up)
        turn = self._timed(worker)
        self.judge.overdue.append(self.kernel.check_of_turn(inputs))
        if self.judge.device.type == "cpu":  # a worker's warm-up would wait for this
            self.judge.catch_up()
        return turn

    def check_placement(self) -> None:
        self.judge.catch_up()
        wrong = self.kernel.wrong
        self._is_drawn = not self._is_checked or secrets.randbelow(_PLACEMENTS_PER_WHOLE_CHECK) == 0
        if self._is_drawn and not self.is_trusted:
            wrong = wrong or self.kernel.check_result().detail
        self._is_checked = True
        if self.kernel.failed is not None and self.kernel.failed[0].detail == wrong:
            found, seeds = self.kernel.failed
            self.note(wrong, FailedInputs(placement=0, seeds=seeds), found.max_rel_error)
        self.note(wrong)  # an error that is not of a result

    def turn_again(self, worker: Worker, failed: FailedInputs) -> None:
        if failed.seeds is not None and failed.launch is None:
            found = self.kernel.repeat(failed.seeds)
            self.note(found.detail, failed, found.max_rel_error)
            return
        if failed.seeds is not None:
            self.kernel.give_again(failed.seeds)
        super().turn_again(worker, failed)

    def begin_leave(self, worker: Worker, *, inspect: bool = True) -> None:
        super().begin_leave(worker, inspect=inspect and self._is_drawn)

    def end_leave(self, worker: Worker) -> None:
        is_known = bool(self.wrong)
        super().end_leave(worker)
        if not is_known and self.failed is not None and self.failed.launch is not None:
            _, w = self.failed.launch
            if w < 0:  # this process gave them
                seeds = self.kernel.seeds_given(worker, -1 - w)
                self.failed = None if seeds is None else replace(self.failed, seeds=seeds)
        if self.opponent is not None and not self.is_trusted:
            self.note(
                _unaccounted(
                    self.turns, self.opponent.turns, self.judge.protocol.max_excess_overhead
                )
                or _rescheduled(self.opponent)
                or self._changed_files()
            )

    def _changed_files(self) -> str:
        files = self.judge.files
        changed = files.first_changed() if files is not None else ""
        return f"{changed} changed while its code ran: no times are believed" if changed else ""

    def _timed(self, worker: Worker) -> SampleBatch:
        with ExitStack() as stack:
            for other in self.others[:1]:
                stack.enter_context(other.paused(self.others[1:]))
            telemetry = stack.enter_context(self.judge.telemetry())
            # During a gap a worker could do work that its samples leave out.
            turn = self.kernel.turn(gap_us=0.0, count=self._count())
            telemetry.note(turn.began, turn.ended)
        self.launches = turn.launches
        overhead_s = turn.whole_s - turn.timed_s - turn.untimed_s(self.judge.device)
        self.turns.append(_Turn(len(turn.samples_us), turn.kept, overhead_s, turn.whole_s))
        state = telemetry.summary()
        return SampleBatch(turn.samples_us, state.sm_clock_mhz, True, self.judge.protocol.trim)

    def _count(self) -> int | None:
        """Number of samples in a turn: head's has as many as base's, whose overhead is its measure.

        More take longer between them, and fewer would leave room to hide time.
        """
        if self.is_trusted or self.opponent is None or not self.opponent.turns:
            return None
        return self.opponent.turns[-1].samples


def judged_pair(
    base: Case,
    head: Case,
    judge: JudgingDevice,
    *,
    believes_binary: bool,
    same: Collection[Case] = (),
) -> CasePair:
    """A pair of cases judged by this process, with head's times relative to base's.

    same: cases with the same code in both.
    """
    is_same = base in same
    # No configuration is chosen for the same code: timing candidates takes longer than its turns.
    first, second = (
        JudgedSide(slot, case, {} if is_same else None, judge=judge)
        for slot, case in (("base", base), ("head", head))
    )
    first.is_trusted, second.believes_binary = True, believes_binary
    first.opponent, second.opponent = second, first
    return CasePair(first, second, same_code=is_same)


def _rescheduled(base: JudgedSide) -> str:
    """Describe that the worker of a trusted side was slowed down; empty: it was not."""
    worker = base.kernel.worker
    changed = worker.rescheduled() if worker is not None else ""
    return f"the {changed} of base's process changed while it was measured" if changed else ""


def _unaccounted(head: Sequence[_Turn], base: Sequence[_Turn], most: float) -> str:
    """Describe errors of head's times; empty: none. most: max_excess_overhead.

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
    over = sum(share > most for share in excess)
    # Binomial: if turns are above and below it equally often, so many above have this small
    # probability.
    chance = sum(math.comb(len(excess), k) for k in range(over, len(excess) + 1))
    if chance > _MAX_P_VALUE * 2 ** len(excess):
        return ""
    return (
        f"its samples leave {statistics.median(excess):.0%} more of its turns unaccounted for than "
        f"base's do, in {over} of {len(excess)}: its clock is not the device's"
    )

"""ABBA blocks of one case: sample batches of two sides, in two workers or in the same one."""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flexq_bench.measure.judged_kernel import Worker
from flexq_bench.measure.judged_work import Seeds
from flexq_bench.measure.sampling import location
from flexq_bench.measure.worker_process import RefusedError, WorkerError
from flexq_bench.workloads.case import Case

# Base may be slower beside head by this much. It is as much as head's clock may be off.
MAX_SLOWED = 0.05
MOST_ALONE = 16  # processes of base in which nothing of head runs
_MAX_CHANCE = 1e-3
# On the same inputs, terms that are summed in another order change an error, but do not double it.
_MAX_ERROR_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Consecutive samples of one side: microseconds per launch, in order.

    mhz: SM clock, mean of before and after; None: not available. valid: the clock was high enough
    throughout. trim: of the protocol by which they were taken.
    """

    samples_us: tuple[float, ...]
    mhz: float | None
    valid: bool
    trim: float | None = None

    @property
    def time_us(self) -> float:
        """Trimmed mean, or median, of the batch; NaN if it does not count."""
        return location(self.samples_us, self.trim) if self.valid else float("nan")


@dataclass(frozen=True, slots=True)
class Block:
    """Two sample batches of each side in the order ABBA: the outer ones are of the same side.

    process: number of the pair of processes. placement: number of the placement in that pair.
    """

    process: int
    placement: int
    base: tuple[SampleBatch, SampleBatch]
    head: tuple[SampleBatch, SampleBatch]

    @property
    def base_us(self) -> float:
        return _mean(batch.time_us for batch in self.base)

    @property
    def head_us(self) -> float:
        return _mean(batch.time_us for batch in self.head)

    @property
    def base_mhz(self) -> float | None:
        return _clock(self.base)

    @property
    def head_mhz(self) -> float | None:
        return _clock(self.head)


def _mean(values: Iterator[float]) -> float:
    return statistics.fmean(values)


def _clock(batches: tuple[SampleBatch, SampleBatch]) -> float | None:
    clocks = [batch.mhz for batch in batches if batch.mhz is not None]
    return statistics.fmean(clocks) if len(clocks) == len(batches) else None


OnBlock = Callable[[Case, Block], None]


@dataclass(frozen=True, slots=True)
class FailedInputs:
    """Inputs of a wrong result, which can be drawn again in another process.

    secret: of the worker; placement: its index. None: the inputs of the check before any placement.
    launch: indices of the worker's own inputs of one launch; None: not known. seeds: of a judge's
    inputs; None: they were the worker's own.
    """

    secret: int | None = None
    placement: int | None = None
    launch: tuple[int, int] | None = None
    seeds: Seeds | None = None


@dataclass
class CaseSide:
    """One side of a case, and its results over all processes so far.

    slot: base or head. config: chosen by the first process; None: not chosen yet. binary: hash of
    its machine code. wrong: description of a wrong result; empty: none. error: its largest relative
    error; None: not known. failed: its inputs; None: not known. launches: of a sample, and
    device_mhz: the device's clock without load, which further workers take from the first; None:
    each determines them. learns: they are learned here; True only for workers that can take them.
    copies: of the weights; None: not known.
    repeats: copies of the weights may have the same contents; True only for trusted workers that
    can.
    """

    slot: str
    case: Case
    config: dict[str, Any] | None = None
    binary: str | None = None
    wrong: str = ""
    error: float | None = None
    failed: FailedInputs | None = None
    launches: int | None = None
    device_mhz: float | None = None
    learns: bool = False
    repeats: bool = False
    copies: int | None = None
    _placed: dict[int, int] = field(default_factory=dict, init=False)  # by worker: its placement

    def note(
        self, wrong: str, failed: FailedInputs | None = None, error: float | None = None
    ) -> None:
        """Keep the first wrong result."""
        if wrong and not self.wrong:
            self.wrong, self.failed, self.error = wrong, failed, error

    def begin_prepare(
        self,
        worker: Worker,
        favourite: dict[str, Any] | None,
        *,
        check: bool = True,
        shares: bool = False,
    ) -> None:
        """Request to prepare the case; `end_prepare` waits for it.

        check: a result, too; False only for workers that can leave it out. shares: weights with the
        other cases of a layer in this process; True only for workers that can.
        """
        worker.send(
            "prepare",
            slot=self.slot,
            case=self.case.key,
            config=self.config,
            favourite=favourite,
            **({} if check else {"check": False}),
            **({"shares": True} if shares else {}),
            **({"distinct": False} if self.repeats else {}),
        )

    def end_prepare(self, worker: Worker) -> None:
        reply = worker.receive()
        self.config, self.binary = reply["config"], reply["binary"]
        self.copies = reply.get("copies")
        self._note_check(reply)

    def _note_check(self, reply: Mapping[str, Any]) -> None:
        """Note what is wrong by a worker's reply to `prepare`."""
        self.note(str(reply["wrong"]), FailedInputs(), reply.get("max_rel_error"))

    def begin_check(self, worker: Worker) -> None:
        """Request to check a result of the default configuration; `end_check` waits for it."""
        worker.send("prepare", slot=self.slot, case=self.case.key, config={}, favourite=None)

    def end_check(self, worker: Worker) -> None:
        self._note_check(worker.receive())

    def begin_place(
        self, worker: Worker, index: int, beside: str | None, *, is_warm: bool = False
    ) -> None:
        """Request a placement; `end_place` waits for it.

        is_warm: the device was just busy; True only for workers that take it into account.
        """
        more: dict[str, Any] = {"is_warm": True} if is_warm else {}
        known = {"launches": self.launches, "device_mhz": self.device_mhz}
        more |= {name: value for name, value in known.items() if value is not None}
        self._placed[id(worker)] = index
        worker.send("place", slot=self.slot, index=index, beside=beside, **more)

    def end_place(self, worker: Worker) -> None:
        worker.receive()

    def give_weights(self, workers: Sequence[Worker]) -> None:
        """Give weights to these workers, which were placed at the same time."""

    def use(self, worker: Worker, others: Sequence[Worker]) -> None:
        """Take samples in this worker from now on. others: those that are on the device, too."""

    def sample(self, worker: Worker) -> SampleBatch:
        reply = worker.ask("turn", slot=self.slot)
        # Workers of commits before protocol 4 don't name a trim: a batch was its median.
        samples, trim = tuple(reply["samples_us"]), reply.get("trim")
        if self.learns:
            self.launches, self.device_mhz = reply["launches"], reply["device_mhz"]
        return SampleBatch(samples, reply["mhz"], reply["valid"], trim)

    def check_placement(self) -> None:
        """Check results of the placement while no worker has a request."""

    def begin_leave(self, worker: Worker, *, inspect: bool = True) -> None:
        """Request to inspect and free the placement; `end_leave` waits for it.

        inspect: False only for workers that can leave it out.
        """
        worker.send("leave", slot=self.slot, **({} if inspect else {"inspect": False}))

    def end_leave(self, worker: Worker) -> None:
        reply = worker.receive()
        failed = None
        if worker.secret is not None:
            launch = reply.get("failed")
            failed = FailedInputs(
                worker.secret, self._placed[id(worker)], None if launch is None else tuple(launch)
            )
        self.note(str(reply["wrong"]), failed)

    def turn_again(self, worker: Worker, failed: FailedInputs) -> None:
        """Take a turn on inputs on which a result was wrong, in their placement."""
        if failed.launch is None:
            worker.ask("turn", slot=self.slot)
            return
        x, w = failed.launch
        self.note(str(worker.ask("launch_again", slot=self.slot, x=x, w=w)["wrong"]))


@dataclass
class CasePair:
    """Both sides of one case with the blocks measured so far, over all pairs of processes.

    processes: number of these pairs. same_kernel: True if the sides run the same kernel from equal
    sources; head then uses base's configuration, because a choice of its own would only add noise.
    base_is_wrong: whether base is wrong where nothing of head runs, on the inputs on which a result
    was wrong (`run_again`); None: it did not run there, or not to the end. same_code: True if this
    process found the same code in both commits. alone_us: base's times where nothing of head ran,
    one of each process. cpu_waits: part of the time of each placement in which a process waited for
    a CPU; empty: on a GPU.
    """

    base: CaseSide
    head: CaseSide
    blocks: list[Block] = field(default_factory=list)
    processes: int = 0
    same_kernel: bool = False
    base_is_wrong: bool | None = None
    same_code: bool = False
    failure: str = ""  # why it could not be measured
    alone_us: list[float] = field(default_factory=list)
    is_on_cpu: bool = False
    cpu_waits: list[float] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """The reason to end the case; empty if there is none.

        A wrong base is none: whether head is right is judged as thoroughly as ever.
        """
        return self.failure or self.head.wrong

    @property
    def is_doubted(self) -> bool:
        """True if base must run where nothing of head runs, to tell which side is wrong.

        Head could disturb base, so its word is not taken for a wrong base, and inputs on which head
        is wrong may be such that base is wrong on them, too.
        """
        if self.failure or self.base_is_wrong is not None:
            return False
        if not self.head.wrong:
            return bool(self.base.wrong)
        failed = self.head.failed
        # The inputs of the first check are the same on both sides.
        return failed is not None and (failed != FailedInputs() or bool(self.base.wrong))

    @property
    def is_corrected(self) -> bool:
        """True if head's result is right where base's is wrong."""
        return bool(self.base_is_wrong) and not self.problem

    @property
    def is_as_wrong(self) -> bool:
        """True if base is wrong on the inputs on which head is, by not much less."""
        if not self.base_is_wrong or not self.head.wrong or self.failure:
            return False
        head, base = self.head.error, self.base.error
        return head is None or base is None or head <= _MAX_ERROR_RATIO * base

    @property
    def is_slowed(self) -> bool | None:
        """True if base is slower beside head than alone; None: it must run alone once more.

        Processes of a kernel with two speeds are slow by chance: if as many of both kinds had been
        drawn from all, the slow ones would all be beside head with this small probability.
        """
        if not self.alone_us:
            return None
        times: dict[int, list[float]] = {}
        for block in self.blocks:
            times.setdefault(block.process, []).append(block.base_us)
        limit = (1 + MAX_SLOWED) * min(self.alone_us)
        beside, alone = len(times), len(self.alone_us)
        slow = sum(statistics.fmean(found) > limit for found in times.values())

        def chance(alone: int) -> float:
            return math.comb(beside, slow) / math.comb(beside + alone, slow)

        if max(self.alone_us) > limit or chance(MOST_ALONE) > _MAX_CHANCE:
            return False
        return True if chance(alone) <= _MAX_CHANCE else None


Sides = Sequence[tuple[CaseSide, Worker]]
_Reply = TypeVar("_Reply")


def measure_blocks(
    pair: CasePair,
    workers: Sequence[tuple[Worker, Worker]],
    process: int,
    *,
    placements: int,
    blocks: int,
    on_block: Callable[[Block], None],
    side_by_side: bool = False,
    shares: bool = False,
    is_warm: bool = False,
    holds: bool = False,
    idle: Sequence[Worker] = (),
) -> None:
    """Measure a case in pairs of processes; add blocks and errors to `pair`.

    workers: of base and head, of each pair; the same one for two kernels. Pairs get ready at the
    same time, if they fit the device, and are measured one after the other. process: number of the
    first pair. The side that is placed first, and the side that starts a block, alternate.
    side_by_side: the workers allocate a placement before they warm it up, so that they can do so at
    the same time, and can leave out the check of a result; True for more than one pair. shares:
    they can share weights among the cases of a layer. is_warm: the device was just busy. holds:
    they can be given weights before their turn. idle: workers that wait for their own turn. Raises
    RefusedError if a side refuses the case, WorkerError if a worker broke.
    """
    groups = [[(pair.base, base), (pair.head, head)] for base, head in workers]
    sides = [each for group in groups for each in group]
    with _released(sides):
        try:
            _check_memory(sides)
        except RefusedError:
            if len(groups) == 1:
                raise
            for number, each in enumerate(workers):
                beside = [other for both in workers if both is not each for other in both]
                measure_blocks(
                    *(pair, [each], process + number),
                    placements=placements,
                    blocks=blocks,
                    on_block=on_block,
                    side_by_side=side_by_side,
                    shares=shares,
                    is_warm=is_warm,
                    holds=holds,
                    idle=[*beside, *idle],
                )
            return
        # Results are inspected after each placement, too.
        check = not side_by_side or process == 0
        if _shares_worker(sides) or any(side.config is None for side, _ in sides):
            # Base chooses first; head uses the same configuration unless its code differs and
            # another one is clearly faster.
            for side, worker in sides:
                if side is pair.head and pair.same_kernel and side.config is None:
                    side.config = pair.base.config
                favourite = pair.base.config if side is pair.head else None
                _prepare([(side, worker)], favourite, check=check, shares=shares)
        else:
            _prepare(sides, None, check=check, shares=shares)
        if pair.problem:
            return
        if pair.base.launches is not None and pair.base.copies == pair.head.copies is not None:
            # Each side fitted their number by its own times; one of fewer launches takes longer.
            pair.head.launches = pair.base.launches
        for placement in range(placements):
            ordered = [
                group if (process + number + placement) % 2 == 0 else group[::-1]
                for number, group in enumerate(groups)
            ]
            every = [
                (side, worker, (process + number) * placements + placement)
                for number, group in enumerate(ordered)
                for side, worker in group
            ]
            _place(every, side_by_side=side_by_side, is_warm=is_warm)
            if holds and len(groups) > 1:
                for at, side in enumerate((pair.base, pair.head)):
                    side.give_weights([both[at] for both in workers])
            there = [*(worker for _, worker in sides), *idle]
            for number, group in enumerate(ordered):
                place = process + number, placement
                _measure_placement(pair, group, there, place, blocks, on_block)
        pair.processes = process + len(groups)


def _measure_placement(
    pair: CasePair,
    ordered: Sides,
    workers: Sequence[Worker],
    place: tuple[int, int],
    blocks: int,
    on_block: Callable[[Block], None],
) -> None:
    """Measure the blocks of a placement, and free it.

    ordered: the side that starts comes first. workers: all there are. place: numbers of the
    process and the placement.
    """
    for side, worker in ordered:
        side.use(worker, [other for other in workers if other is not worker])
    with on_one_cpu(pair, ordered):
        began, waited_s = time.monotonic(), _waited_s(pair, ordered)
        for number in range(blocks):
            outer, inner = ordered if number % 2 == 0 else ordered[::-1]
            block = _block(outer, inner, pair, *place)
            pair.blocks.append(block)
            on_block(block)
        if pair.is_on_cpu:
            waited_s = _waited_s(pair, ordered) - waited_s
            pair.cpu_waits.append(waited_s / (time.monotonic() - began))
    # The second side may share the weights of the first.
    _leave(ordered[::-1])


@contextmanager
def on_one_cpu(pair: CasePair, sides: Sides) -> Iterator[None]:
    """Let both sides of a case on a CPU run on the same core, which is drawn.

    No two are equally fast, nor as busy, and the sides would each stay on theirs.
    """
    if not pair.is_on_cpu or not hasattr(os, "sched_getaffinity"):
        yield
        return
    cpus = os.sched_getaffinity(0)
    core = {random.choice(sorted(cpus))}
    for _, worker in sides:
        worker.run_on(core)
    yield
    for _, worker in sides:
        worker.run_on(cpus)


def _waited_s(pair: CasePair, sides: Sides) -> float:
    """Seconds that the workers of sides have waited for a CPU; 0: on a GPU, that is no matter."""
    workers = {id(worker): worker for _, worker in sides} if pair.is_on_cpu else {}
    return sum(worker.waited_s() for worker in workers.values())


def check_results(sides: Sides) -> None:
    """Check a result of each side, in different workers at the same time, untimed.

    What is compiled for it is found in a cache by the processes that follow. Raises as
    measure_blocks.
    """
    with _released(sides):
        _check_memory(sides)
        _at_once(
            sides,
            lambda side, worker: side.begin_check(worker),
            lambda side, worker: side.end_check(worker),
        )


def run_again(
    side: CaseSide, worker: Worker, failed: FailedInputs, *, placements: int, turns: int
) -> None:
    """Check results of one side on inputs on which one was wrong, until one is wrong again.

    placements: at most, with so many turns each, because a kernel may be wrong by chance. Raises as
    measure_blocks.
    """
    if failed.secret is not None:
        worker.reseed(failed.secret)
    with _released([(side, worker)]):
        _prepare([(side, worker)], None, check=failed.placement is None)
        if failed.placement is None:
            return
        for _ in range(placements):
            _place([(side, worker, failed.placement)])
            for _ in range(turns):
                if not side.wrong:
                    side.turn_again(worker, failed)
            side.begin_leave(worker, inspect=failed.seeds is None and failed.launch is None)
            side.end_leave(worker)
            if side.wrong:
                return


def run_alone(
    side: CaseSide, worker: Worker, *, placements: int, blocks: int, is_brief: bool = False
) -> list[float]:
    """Run as many turns of one side as beside another, until a result is wrong; return their times.

    is_brief: only to time it, in a worker that can do what measure_blocks asks for. Raises as
    measure_blocks.
    """
    times: list[float] = []
    with _released([(side, worker)]):
        _prepare([(side, worker)], None, check=not is_brief, shares=is_brief)
        for placement in range(placements):
            if side.wrong:
                break
            _place([(side, worker, placement)])
            times += [side.sample(worker).time_us for _ in range(2 * blocks)]
            _leave([(side, worker)])
    return times


def _prepare(
    sides: Sides, favourite: dict[str, Any] | None, *, check: bool = True, shares: bool = False
) -> None:
    """Prepare sides in different workers at the same time, because nothing is timed."""

    def begin(side: CaseSide, worker: Worker) -> None:
        side.begin_prepare(worker, favourite, check=check, shares=shares)

    _at_once(sides, begin, lambda side, worker: side.end_prepare(worker))


def _place(
    placed: Sequence[tuple[CaseSide, Worker, int]],
    *,
    side_by_side: bool = False,
    is_warm: bool = False,
) -> None:
    """Place sides, the second of one worker beside the first.

    placed: with the index of each placement, which is the same for both sides of a pair: addresses
    differ from pair to pair.
    """
    sides = [(side, worker) for side, worker, _ in placed]
    index = {id(worker): at for _, worker, at in placed}
    shares = _shares_worker(sides)

    def begin(side: CaseSide, worker: Worker) -> None:
        is_second = side is not sides[0][0] or worker is not sides[0][1]
        beside = sides[0][0].slot if is_second and shares else None
        # The first one's warm-up comes before the second's.
        warm = side_by_side and (is_warm or is_second)
        side.begin_place(worker, index[id(worker)], beside, is_warm=warm)

    for group in [sides] if side_by_side else [[each] for each in sides]:
        _at_once(group, begin, lambda side, worker: side.end_place(worker))


def _leave(sides: Sides) -> None:
    for side, _ in sides:
        side.check_placement()
    _at_once(
        sides,
        lambda side, worker: side.begin_leave(worker),
        lambda side, worker: side.end_leave(worker),
    )


def _at_once(
    sides: Sides,
    begin: Callable[[CaseSide, Worker], None],
    end: Callable[[CaseSide, Worker], _Reply],
) -> list[_Reply]:
    """Send a request to each side's worker, then wait for all; return the replies.

    Sides that share a worker come one after the other. Raises the first of their errors.
    """
    errors: list[RefusedError | WorkerError] = []
    replies: list[_Reply] = []
    for group in [[each] for each in sides] if _shares_worker(sides) else [sides]:
        waiting = []
        for side, worker in group:
            try:
                begin(side, worker)
                waiting.append((side, worker))
            except (RefusedError, WorkerError) as error:
                errors.append(error)
        for side, worker in waiting:
            try:
                replies.append(end(side, worker))
            except (RefusedError, WorkerError) as error:
                errors.append(error)
    if errors:
        raise errors[0]
    return replies


def _shares_worker(sides: Sides) -> bool:
    return len({id(worker) for _, worker in sides}) < len(sides)


@contextmanager
def _released(sides: Sides) -> Iterator[None]:
    """Let workers free the memory of a case at the end. An interrupted one may never reply."""
    is_interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        with suppress(RefusedError, WorkerError):
            _at_once(
                () if is_interrupted else sides,
                lambda side, worker: worker.send("release", slot=side.slot),
                lambda _, worker: worker.receive(),
            )


def _block(
    outer: tuple[CaseSide, Worker],
    inner: tuple[CaseSide, Worker],
    pair: CasePair,
    process: int,
    placement: int,
) -> Block:
    first, second = outer[0].sample(outer[1]), inner[0].sample(inner[1])
    third, fourth = inner[0].sample(inner[1]), outer[0].sample(outer[1])
    if outer[0] is pair.base:
        return Block(process, placement, base=(first, fourth), head=(second, third))
    return Block(process, placement, base=(second, third), head=(first, fourth))


def _check_memory(sides: Sides) -> None:
    """Raise RefusedError if the sides together don't fit the device."""
    replies = _at_once(
        sides,
        lambda side, worker: worker.send("memory", case=side.case.key),
        lambda _, worker: worker.receive(),
    )
    needed = sum(reply["needed"] for reply in replies)
    free = min(reply["free"] for reply in replies)
    if needed > free:
        raise RefusedError(
            f"{sides[0][0].case.key}: both sides together would take {needed / 2**30:,.1f} GiB and "
            f"this device has {free / 2**30:,.1f} GiB free: make M, N or K smaller"
        )

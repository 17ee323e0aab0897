"""Taking turns: two sides of one case, each in a worker, or both in the same one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from flexq_bench.interleave.process import RefusedError, WorkerError
from flexq_bench.interleave.values import Block, Turn
from workloads.case import Case


class Worker(Protocol):
    """Who answers (see Stand for what)."""

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]: ...

    def paused(self) -> AbstractContextManager[None]: ...


@dataclass
class Side:
    """One side of a case in a worker, and what is known of it from one process to the next.

    slot: base or head. config: what was chosen by the first process; None: nothing yet.
    binary: hash of its machine code. wrong: what is wrong with a result; empty: nothing.
    """

    slot: str
    case: Case
    config: dict[str, Any] | None = None
    binary: str | None = None
    wrong: str = ""

    def prepare(self, worker: Worker, favourite: dict[str, Any] | None) -> None:
        reply = worker.ask(
            "prepare",
            slot=self.slot,
            case=self.case.key,
            config=self.config,
            favourite=favourite,
        )
        self.config, self.binary = reply["config"], reply["binary"]
        self.wrong = self.wrong or reply["wrong"]

    def place(self, worker: Worker, index: int, beside: str | None) -> None:
        worker.ask("place", slot=self.slot, index=index, beside=beside)

    def turn(self, worker: Worker) -> Turn:
        reply = worker.ask("turn", slot=self.slot)
        return Turn(tuple(reply["samples_us"]), reply["mhz"], reply["valid"])

    def leave(self, worker: Worker) -> None:
        wrong = worker.ask("leave", slot=self.slot)["wrong"]
        self.wrong = self.wrong or wrong

    def release(self, worker: Worker) -> None:
        with suppress(RefusedError, WorkerError):
            worker.ask("release", slot=self.slot)


@dataclass
class Match:
    """Both sides of one case, over all pairs of processes."""

    base: Side
    head: Side
    blocks: list[Block] = field(default_factory=list)
    failure: str = ""  # why it could not be measured

    @property
    def problem(self) -> str:
        """Why there is nothing more to measure; empty: nothing is wrong."""
        return self.failure or self.base.wrong or self.head.wrong


def play(
    match: Match,
    workers: tuple[Worker, Worker],
    process: int,
    *,
    placements: int,
    blocks: int,
    on_block: Callable[[Block], None],
) -> None:
    """Measure a case in one pair of processes; blocks and what is wrong go to `match`.

    workers: of base and head; the same one for two kernels. process: number of the pair; who is
    placed first, and who begins a block, alternates.
    Raises RefusedError if a side can't be had, WorkerError if a worker broke.
    """
    sides = [(match.base, workers[0]), (match.head, workers[1])]
    try:
        _check_memory(sides)
        for side, worker in sides:
            # The first to choose is base; head takes the same unless another is clearly faster.
            side.prepare(worker, match.base.config if side is match.head else None)
        if match.problem:
            return
        share = workers[0] is workers[1]
        for placement in range(placements):
            ordered = sides if (process + placement) % 2 == 0 else sides[::-1]
            (first, its_worker), (second, other_worker) = ordered
            first.place(its_worker, placement, None)
            second.place(other_worker, placement, first.slot if share else None)
            for number in range(blocks):
                outer, inner = ordered if number % 2 == 0 else ordered[::-1]
                block = _block(outer, inner, match, process, placement)
                match.blocks.append(block)
                on_block(block)
            # The second may use the weights of the first.
            second.leave(other_worker)
            first.leave(its_worker)
    finally:
        for side, worker in sides:
            side.release(worker)


def _block(
    outer: tuple[Side, Worker], inner: tuple[Side, Worker], match: Match, process: int, at: int
) -> Block:
    first, second = outer[0].turn(outer[1]), inner[0].turn(inner[1])
    third, fourth = inner[0].turn(inner[1]), outer[0].turn(outer[1])
    if outer[0] is match.base:
        return Block(process, at, base=(first, fourth), head=(second, third))
    return Block(process, at, base=(second, third), head=(first, fourth))


def _check_memory(sides: list[tuple[Side, Worker]]) -> None:
    """Raise RefusedError if the two don't fit the device together."""
    found = [worker.ask("memory", case=side.case.key) for side, worker in sides]
    needed, free = sum(reply["needed"] for reply in found), min(reply["free"] for reply in found)
    if needed > free:
        raise RefusedError(
            f"{sides[0][0].case.key}: both sides together would take {needed / 2**30:,.1f} GiB and "
            f"this device has {free / 2**30:,.1f} GiB free: make M, N or K smaller"
        )

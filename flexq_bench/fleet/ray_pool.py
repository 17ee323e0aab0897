"""A crew whose workers are Ray actors: one on each GPU of the cluster, or on each CPU slot."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from db.tuning import ChoiceInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.exit_reasons import reason_of
from flexq_bench.fleet.pool import Event, Finished, Joined, Lost, Member, Report
from flexq_bench.fleet.ray_nodes import Seat, is_alive, seats
from flexq_bench.fleet.ray_session import ray_session
from flexq_bench.fleet.ray_worker import Greeting, MeterActor
from flexq_bench.fleet.retry_policy import MAX_FAILURES, is_blameless, is_given_up, pause_s
from flexq_bench.fleet.timeouts import Times
from flexq_bench.measure import Tuning
from flexq_bench.repository.provenance import ROOT, source_hash
from kernels.contract import Backend
from workloads.case import Case

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Actor:
    """An actor on a seat. uuid empty: it has not said that it is ready."""

    seat: Seat
    handle: Any
    waits_for: Any  # the reference to its answer; None: it is idle
    since: float
    uuid: str = ""
    gpu: str = ""


@dataclass(slots=True)
class _Trouble:
    """What went wrong on a seat since the last case that went well there."""

    failures: int = 0
    retry_at: float = 0.0
    reason: str = field(default="")


class RayCrew:
    """Workers on all GPUs that a cluster has, also on nodes that join later.

    address: "local" or a Ray address. backend None: GPUs if the cluster has any, else CPUs.
    actor: the class of the workers, called with backend, seed and tuning.
    Opening it raises InfrastructureError if Ray can't be started or reached, or has no GPU where
    GPUs are asked for.
    """

    def __init__(
        self,
        address: str,
        *,
        backend: Backend | None,
        seed: int,
        tuning: Tuning = Tuning.REMEMBERED,
        times: Times | None = None,
        actor: type = MeterActor,
    ) -> None:
        self._address, self._asked = address, backend
        self.backend: Backend = backend or "cpu"
        self._seed, self._tuning, self._class = seed, tuning, actor
        self._times = times or Times()
        self._actors: dict[Seat, _Actor] = {}
        self._trouble: dict[Seat, _Trouble] = {}
        self._seats: tuple[Seat, ...] = ()
        self._events: list[Event] = []
        self._next_scan = 0.0
        self._sources = source_hash(ROOT)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        gpus = 0 if self._asked == "cpu" else None
        with ExitStack() as opening:
            opening.enter_context(ray_session(self._address, gpus=gpus))
            import ray

            found = ray.cluster_resources().get("GPU", 0)
            if self._asked == "cuda" and not found:
                raise InfrastructureError(
                    f"the cluster ({self._address}) has no GPU: use --backend cpu, or add a node"
                )
            self.backend = self._asked or ("cuda" if found else "cpu")
            self._scan()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._actors.clear()
        self._open.close()

    @property
    def arriving(self) -> int:
        return sum(
            not is_given_up(self._troubles(seat).failures)
            for seat in self._seats
            if seat not in self._actors or not self._actors[seat].uuid
        )

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why there are no workers on seats."""
        seated = {seat for seat, actor in self._actors.items() if actor.uuid}
        reasons = (t.reason for seat, t in self._trouble.items() if seat not in seated)
        return tuple(dict.fromkeys(filter(None, reasons)))

    def poll(self, timeout_s: float) -> Sequence[Event]:
        import ray

        if time.monotonic() >= self._next_scan:
            self._scan()
        self._start_missing()
        waiting = {a.waits_for: a for a in self._actors.values() if a.waits_for is not None}
        if not self._events and waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
            if ready:  # all that have come meanwhile are one transaction
                ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            for reference in ready:
                self._answer(waiting[reference], reference)
        elif not self._events:
            time.sleep(min(timeout_s, self._times.scan))
        self._refuse_late()
        events, self._events = self._events, []
        return events

    def start(self, member: str, case: Case, choices: Sequence[ChoiceInfo]) -> None:
        actor = self._of(member)
        actor.waits_for = actor.handle.measure.remote(case, tuple(choices))

    def end(self, member: str, reason: str) -> None:
        self._lose(self._of(member), reason, blameless=False)

    def unfit(self, member: str, cases: Sequence[Case]) -> Mapping[str, str]:
        import ray

        actor = self._of(member)
        try:
            answer = actor.handle.unfit.remote(tuple(cases))
            reasons: dict[str, str] = ray.get(answer, timeout=self._times.start)
        except ray.exceptions.RayError as error:
            reason = reason_of(error)
            self._lose(actor, reason, blameless=False)
            raise InfrastructureError(f"a worker did not answer: {reason}") from error
        return reasons

    def lend(self, gpu: str, borrower: type, method: str, *arguments: Any) -> Any:
        """Have an actor of another class do one thing on a GPU of this kind, whose worker goes.

        What it raises is raised here. Raises InfrastructureError if no worker of the kind is idle.
        """
        import ray

        actor = next(
            (a for a in self._actors.values() if a.gpu == gpu and a.uuid and a.waits_for is None),
            None,
        )
        if actor is None:
            raise InfrastructureError(f"no {gpu} is free: see `flexq-bench status`")
        seat = actor.seat
        self._lose(actor, "its GPU was lent to a comparison", blameless=True)
        self._trouble.pop(seat, None)
        handle = seat.create(borrower, self._seed, self._tuning)
        try:
            return ray.get(getattr(handle, method).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            raise InfrastructureError(f"a comparison on {gpu} ended: {reason_of(error)}") from error
        finally:
            ray.kill(handle)

    def _scan(self) -> None:
        self._next_scan = time.monotonic() + self._times.scan
        self._seats = seats(self.backend, local=self._address == "local")

    def _start_missing(self) -> None:
        now = time.monotonic()
        for seat in self._seats:
            if seat not in self._actors and self._troubles(seat).retry_at <= now:
                handle = seat.create(self._class, self._seed, self._tuning)
                self._actors[seat] = _Actor(seat, handle, handle.describe.remote(), now)

    def _answer(self, actor: _Actor, reference: Any) -> None:
        import ray

        actor.waits_for = None
        try:
            answer = ray.get(reference)
        except (InfrastructureError, ray.exceptions.RayError) as error:
            reason, alive = reason_of(error), is_alive(actor.seat.node)
            self._lose(actor, reason, blameless=is_blameless(error, reason, node_is_alive=alive))
        else:
            if isinstance(answer, Greeting):
                self._greet(actor, answer)
            else:
                self._report(actor, answer)

    def _report(self, actor: _Actor, report: Report) -> None:
        self._trouble.pop(actor.seat, None)
        self._events.append(Finished(actor.uuid, report))

    def _greet(self, actor: _Actor, greeting: Greeting) -> None:
        if greeting.sources != self._sources:
            host = greeting.worker.environment.get("host", actor.seat.host)
            self._lose(
                actor,
                f"{host} has other kernel sources than this machine: install this commit there",
                blameless=True,
            )
            self._troubles(actor.seat).failures = MAX_FAILURES
            return
        actor.uuid, actor.gpu = str(uuid.uuid4()), greeting.worker.device.sku
        self._events.append(Joined(Member(actor.uuid, greeting.worker, greeting.software)))

    def _refuse_late(self) -> None:
        now = time.monotonic()
        for actor in list(self._actors.values()):
            if not actor.uuid and now - actor.since > self._times.start:
                reason = (
                    f"no worker on {actor.seat.host} after {self._times.start:.0f} s: somebody "
                    "else holds the cluster's devices (see `ray status`)"
                )
                self._lose(actor, reason, blameless=True)

    def _lose(self, actor: _Actor, reason: str, *, blameless: bool) -> None:
        import ray

        ray.kill(actor.handle)
        del self._actors[actor.seat]
        trouble = self._troubles(actor.seat)
        trouble.reason = reason
        trouble.failures += 1
        trouble.retry_at = time.monotonic() + pause_s(trouble.failures)
        if actor.uuid:
            self._events.append(Lost(actor.uuid, reason, blameless))
        else:
            log.warning("no worker on %s: %s", actor.seat.host, reason)

    def _troubles(self, seat: Seat) -> _Trouble:
        return self._trouble.setdefault(seat, _Trouble())

    def _of(self, member: str) -> _Actor:
        return next(actor for actor in self._actors.values() if actor.uuid == member)

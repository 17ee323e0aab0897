"""Ray actors, one per slot of a cluster: started, called, and replaced if lost.

Subclasses are `RayWorkers`, which measures cases, and `RayEvaluators` in
`flexq_bench.accuracy.ray_evaluation`.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.ray_cluster import LOCAL, Slot, is_alive, ray_session, slots
from flexq_bench.fleet.retry_policy import MAX_FAILURES, is_blameless, is_given_up, pause_s
from flexq_bench.fleet.shipping import answer_of, call
from flexq_bench.fleet.timeouts import Times
from flexq_bench.fleet.workers import Event, Finished, Joined, Lost
from flexq_bench.kernels.contract import Backend

_PROCESS_START_S = 10.0  # longest time that Ray needs to start a process on a free device
_CLASS_NAME = re.compile(r"^[\w.]+: ")
_GENERAL_ADVICE = " Some common causes include"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Actor:
    """An actor on a slot. uuid empty: it is not ready yet. beat_at: time of the last question."""

    slot: Slot
    handle: Any
    pending: Any  # ObjectRef of the call in progress; None: it is idle
    since: float
    started: Any = None  # ObjectRef that is available once its process runs on its devices
    uuid: str = ""
    beat: Any = None  # ObjectRef of the answer to a question whether it is alive; None: not asked
    beat_at: float = 0.0


@dataclass(slots=True)
class _SlotFailures:
    """The failures of a slot since its last successful call."""

    count: int = 0
    retry_at: float = 0.0
    reason: str = field(default="")


class RayActors(ABC):
    """Actors on all devices of a cluster, including nodes that join later.

    address: "local" or a Ray address. backend None: GPUs if the cluster has any, else CPUs. actor:
    the class of the actors, called with the backend and the arguments; `replace_class` changes it.
    Actors of a class with a method `beat` are asked for it while they work, and are lost if they
    don't answer for the duration of a lease. most: the largest number of
    actors; None: no limit. A subclass names the first method that is called on every actor
    (`greeting`), and converts its result to the worker of a Joined (`introduced`).

    Entering the context raises InfrastructureError if Ray can't be started or reached, or has no
    GPU although GPUs were requested.
    """

    greeting: ClassVar[str]
    no_gpu_advice: ClassVar[str] = "use --backend cpu, or add a node"

    def __init__(
        self,
        address: str,
        actor: type,
        *arguments: object,
        backend: Backend | None,
        times: Times,
        most: int | None = None,
    ) -> None:
        self._address, self._requested_backend = address, backend
        self.backend: Backend = backend or "cpu"
        self._class, self._arguments = actor, arguments
        self._times, self._most = times, most
        self._actors: dict[Slot, Actor] = {}
        self._failures: dict[Slot, _SlotFailures] = {}
        self._given_back: dict[Slot, str] = {}  # uuids of their last actors
        self._slots: tuple[Slot, ...] = ()
        self._one_per_host, self._gpus = False, 1
        self._events: list[Event] = []
        self._next_scan = 0.0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        gpus = 0 if self._requested_backend == "cpu" else None
        with ExitStack() as opening:
            opening.enter_context(ray_session(self._address, gpus=gpus))
            count = self._gpus_after_waiting()
            if self._requested_backend == "cuda" and not count:
                raise InfrastructureError(
                    f"the cluster ({self._address}) has no GPU: {self.no_gpu_advice}"
                )
            self.backend = self._requested_backend or ("cuda" if count else "cpu")
            self._scan()
            self._open = opening.pop_all()
        return self

    def _gpus_after_waiting(self) -> float:
        """Return the cluster's number of GPUs, when it has a device of the requested backend.

        Nodes that have not joined yet are waited for as long as `device` says.
        """
        import ray

        give_up = time.monotonic() + (0.0 if self._address == LOCAL else self._times.device)
        is_logged = False
        while True:
            resources = ray.cluster_resources()
            gpus, cpus = (resources.get(name, 0) for name in ("GPU", "CPU"))
            wanted = {"cuda": gpus, "cpu": cpus, None: gpus or cpus}[self._requested_backend]
            if wanted or time.monotonic() >= give_up:
                return float(gpus)
            if not is_logged:
                what = "a GPU" if self._requested_backend == "cuda" else "a device"
                log.warning("waiting up to %.0f s for a node with %s", self._times.device, what)
                is_logged = True
            time.sleep(min(1.0, self._times.scan))

    def __exit__(self, *error: object) -> None:
        self._actors.clear()
        self._open.close()

    @abstractmethod
    def introduced(self, actor: Actor, answer: Any) -> Any:
        """The worker of a Joined, from the result of the actor's first call.

        Raises InfrastructureError to refuse the actor permanently.
        """

    @property
    def arriving(self) -> int:
        """Actors that are being started."""
        return sum(
            not is_given_up(self._failures_of(slot).count)
            for slot in self._slots
            if slot not in self._given_back
            and (slot not in self._actors or not self._actors[slot].uuid)
        )

    @property
    def blocked(self) -> int:
        """Actors that are being started and wait for devices in use by others."""
        import ray

        since = time.monotonic() - _PROCESS_START_S
        late = [a.started for a in self._actors.values() if not a.uuid and a.since < since]
        return len(ray.wait(late, num_returns=len(late), timeout=0)[1]) if late else 0

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons why slots have no actor."""
        return self._reasons_of(self._failures)

    def refusals_of(self, gpu: str) -> tuple[str, ...]:
        """Reasons why slots, perhaps of this SKU, were given up.

        Ray's name of a GPU is a part of its SKU; that of a CPU is not known.
        """
        given_up = (slot for slot, t in self._failures.items() if is_given_up(t.count))
        words = set(re.split(r"\W+", gpu))
        return self._reasons_of(
            slot
            for slot in given_up
            if words.issuperset(slot.accelerator.split("-")) or not slot.accelerator
        )

    @property
    def refused_gpus(self) -> dict[str, str]:
        """Reasons, by Ray's name of a GPU, why workers on all of its slots were given up."""
        ready = {slot.accelerator for slot, actor in self._actors.items() if actor.uuid}
        given_up: dict[str, list[Slot]] = {}
        for slot in self._slots:
            if slot.accelerator not in {"", *ready} and is_given_up(self._failures_of(slot).count):
                given_up.setdefault(slot.accelerator, []).append(slot)
        return {name: "; ".join(self._reasons_of(slots)) for name, slots in given_up.items()}

    def _reasons_of(self, slots_without: Iterable[Slot]) -> tuple[str, ...]:
        ready = {slot for slot, actor in self._actors.items() if actor.uuid}
        reasons = (self._failures[slot].reason for slot in slots_without if slot not in ready)
        return tuple(dict.fromkeys(filter(None, reasons)))

    def poll(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call; wait at most timeout_s for the first one."""
        import ray

        if time.monotonic() >= self._next_scan:
            self._scan()
        self._start_missing()
        pending = {a.pending: a for a in self._actors.values() if a.pending is not None}
        if not self._events and pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=timeout_s)
            if ready:  # all that are ready by now are stored in one transaction
                ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            for reference in ready:
                self._handle_ready(pending[reference], reference)
        elif not self._events:
            time.sleep(min(timeout_s, self._times.scan))
        self._end_late_starts()
        self._end_silent()
        events, self._events = self._events, []
        return events

    def call(self, worker: str, method: str, *arguments: object) -> None:
        """Call a method of an idle actor; a Finished or a Lost follows."""
        actor = self._actor(worker)
        actor.pending = call(actor.handle, method, *arguments)

    def call_and_wait(self, worker: str, method: str, *arguments: object) -> Any:
        """Call a method of an idle actor and return its result.

        Raises InfrastructureError if the call fails; a Lost follows then.
        """
        actor = self._actor(worker)
        try:
            return answer_of(call(actor.handle, method, *arguments), timeout_s=self._times.start)
        except Exception as error:
            reason = reason_of(error)
            self._lose(actor, reason, blameless=False)
            raise InfrastructureError(f"a worker did not answer: {reason}") from error

    def answer(self, worker: str, answer: object) -> None:
        """Answer a call in place of an idle actor: a Finished follows."""
        self._events.append(Finished(worker, answer))

    def end(self, worker: str, reason: str) -> None:
        """Kill an actor's process, idle or not; a Lost follows."""
        self._lose(self._actor(worker), reason, blameless=False)

    def give_back(self, worker: str) -> None:
        """End an idle actor; its slot is free for others. A Lost without a reason follows."""
        actor = self._actor(worker)
        self._end(actor)
        self._given_back[actor.slot] = worker
        self._events.append(Lost(worker, "", blameless=True))

    def take_back(self, workers: Collection[str]) -> None:
        """Let actors be started on the slots that these gave back."""
        kept = {slot: worker for slot, worker in self._given_back.items() if worker not in workers}
        self._given_back = kept

    def replace_class(
        self, actor: type, *arguments: object, one_per_host: bool, gpus: int = 1
    ) -> None:
        """End all actors; others of this class, called with these arguments, take their slots.

        one_per_host: only the first slot of each node. gpus: of each slot. A Lost without a reason
        follows for each.
        """
        self._class, self._arguments, self._one_per_host = actor, arguments, one_per_host
        self._gpus = gpus
        self._given_back.clear()
        for ended in list(self._actors.values()):
            self._end(ended)
            if ended.uuid:
                self._events.append(Lost(ended.uuid, "", blameless=True))
        self._scan()

    def _scan(self) -> None:
        self._next_scan = time.monotonic() + self._times.scan
        free = slots(self.backend, local=self._address == LOCAL, gpus=self._gpus)
        if self._one_per_host:
            free = tuple(slot for slot in free if slot.number == 0)
        self._slots = free[: self._most]

    def _start_missing(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot in self._actors or slot in self._given_back:
                continue
            if self._failures_of(slot).retry_at <= now:
                handle = slot.create(self._class, *self._arguments)
                started = handle.started.remote()
                self._actors[slot] = Actor(slot, handle, call(handle, self.greeting), now, started)

    def _handle_ready(self, actor: Actor, reference: Any) -> None:
        actor.pending = None
        try:
            answer = answer_of(reference)
        except Exception as error:  # any that the actor raised, or Ray's for its loss
            self._fail(actor, error)
        else:
            if actor.uuid:
                self._failures.pop(actor.slot, None)
                self._events.append(Finished(actor.uuid, answer))
            else:
                self._register(actor, answer)

    def _fail(self, actor: Actor, error: Exception) -> None:
        """End an actor whose call raised."""
        reason = reason_of(error)
        alive = is_alive(actor.slot.node)
        self._lose(actor, reason, blameless=is_blameless(error, reason, node_is_alive=alive))
        if isinstance(error, ImportError):  # the node can't run the program: another try can't help
            self._failures_of(actor.slot).count = MAX_FAILURES

    def _register(self, actor: Actor, answer: Any) -> None:
        actor.uuid = str(uuid.uuid4())
        try:
            joined = Joined(self.introduced(actor, answer))
        except InfrastructureError as error:
            actor.uuid = ""
            self._lose(actor, str(error), blameless=True)
            self._failures_of(actor.slot).count = MAX_FAILURES
        else:
            self._events.append(joined)

    def _end_late_starts(self) -> None:
        now = time.monotonic()
        for actor in list(self._actors.values()):
            if not actor.uuid and now - actor.since > self._times.start:
                reason = (
                    f"no worker on {actor.slot.host} after {self._times.start:.0f} s: other "
                    "processes hold the cluster's devices (see `ray status`), or its kernels need "
                    "longer to load (--times start=SECONDS)"
                )
                self._lose(actor, reason, blameless=True)

    def _end_silent(self) -> None:
        """Ask the working actors whether they are alive, and end those that do not answer."""
        if not hasattr(self._class, "beat"):
            return
        import ray

        now = time.monotonic()
        for actor in list(self._actors.values()):
            if not actor.uuid or actor.pending is None:
                actor.beat = None
            elif actor.beat is None or ray.wait([actor.beat], timeout=0)[0]:
                if now - actor.beat_at >= self._times.beat:
                    actor.beat, actor.beat_at = actor.handle.beat.remote(), now
            elif now - actor.beat_at > self._times.lease:
                reason = f"its process on {actor.slot.host} is silent for {self._times.lease:.0f} s"
                self._lose(actor, reason, blameless=False)

    def _end(self, actor: Actor) -> None:
        import ray

        ray.kill(actor.handle)
        del self._actors[actor.slot]

    def _lose(self, actor: Actor, reason: str, *, blameless: bool) -> None:
        self._end(actor)
        failures = self._failures_of(actor.slot)
        failures.reason = reason
        failures.count += 1
        failures.retry_at = time.monotonic() + pause_s(failures.count)
        if actor.uuid:
            self._events.append(Lost(actor.uuid, reason, blameless))
        else:
            log.warning("no worker on %s: %s", actor.slot.host, reason)

    def _failures_of(self, slot: Slot) -> _SlotFailures:
        return self._failures.setdefault(slot, _SlotFailures())

    def _actor(self, worker: str) -> Actor:
        return next(actor for actor in self._actors.values() if actor.uuid == worker)


def reason_of(error: BaseException) -> str:
    """Return the reason for the loss of a worker in one line, from the exception that Ray raised.

    Ray wraps an actor's exception in a traceback whose first line names only the actor, and reports
    a death in the last line of a list of the actor's properties.
    """
    raised = getattr(error, "cause", None)
    if raised is not None:
        return reason_of(raised)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if getattr(error, "actor_init_failed", False):
        return _CLASS_NAME.sub("", lines[-1])
    is_list = any(line.startswith("actor_id:") for line in lines)
    return (lines[-1] if is_list else lines[0]).partition(_GENERAL_ADVICE)[0]

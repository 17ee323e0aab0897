"""Workers restricted to the first few, to measure fewer GPUs with the same processes."""

from __future__ import annotations

from collections.abc import Sequence

from flexq_bench.fleet import RayWorkers
from flexq_bench.fleet.workers import Event, Joined, Lost


class NarrowingWorkers(RayWorkers):
    """`narrow` leaves out all workers but the first; their processes stay and do nothing."""

    _there: tuple[str, ...] = ()  # workers that joined, in order
    _left_out: frozenset[str] = frozenset()
    _most: int | None = None  # None: all

    def narrow(self, workers: int) -> None:
        self._most = workers

    def poll(self, timeout_s: float) -> Sequence[Event]:
        events: list[Event] = []
        for event in super().poll(timeout_s):
            if isinstance(event, Joined):
                if self._most is not None and len(self._present) >= self._most:
                    self._left_out |= {event.worker.uuid}
                    continue
                self._there = (*self._there, event.worker.uuid)
            elif event.worker in self._left_out:
                continue
            elif isinstance(event, Lost):
                self._there = tuple(uuid for uuid in self._there if uuid != event.worker)
            events.append(event)
        if self._most is not None:
            spare = self._present[self._most :]
            events.extend(Lost(uuid, "left out of this night", blameless=True) for uuid in spare)
            self._left_out |= set(spare)
        return events

    @property
    def _present(self) -> list[str]:
        return [uuid for uuid in self._there if uuid not in self._left_out]

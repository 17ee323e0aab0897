"""Pairs of worker processes, of which the next ones can start before they are needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from flexq_bench.measure.worker_process import WorkerProcess

Workers = tuple[WorkerProcess, WorkerProcess]  # base's and head's, which may be the same

# The processes that measure, this one and those that start must not wait for each other's CPUs.
_MIN_CPUS = 8


def can_start_beside(device: str) -> bool:
    """Return True if processes that start don't disturb a measurement on this device."""
    return not device.startswith("cpu") and available_cpus() >= _MIN_CPUS


class WorkerPairs:
    """The pairs of workers of a comparison, each for one use; some may wait to be used.

    start: starts two workers that the given stack ends. unused: ends the pairs that wait.
    """

    def __init__(self, start: Callable[[ExitStack], Workers], unused: ExitStack) -> None:
        self._start = start
        self._unused = unused
        self._waiting: list[Workers] = []

    def start_ahead(self, count: int = 1) -> Workers:
        """Start pairs now until so many wait; return the first one."""
        while len(self._waiting) < count:
            self._waiting.append(self._start(self._unused))
        return self._waiting[0]

    def discard(self) -> None:
        """End the pairs that wait."""
        self._waiting = []
        self._unused.pop_all().close()

    def take(self, stack: ExitStack, count: int = 1) -> list[Workers]:
        """Return so many pairs, first those that wait; `stack` ends them, and all that wait."""
        workers, self._waiting = self._waiting, []
        stack.enter_context(self._unused.pop_all())
        workers += [self._start(stack) for _ in range(count - len(workers))]
        return workers[:count]


def available_cpus() -> int:
    """Number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

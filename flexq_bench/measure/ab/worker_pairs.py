"""Pairs of worker processes, of which the next one can start while the current one measures."""

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
    """The pairs of workers of a comparison, each for one use; at most one waits to be used.

    start: starts two workers that the given stack ends. unused: ends the pair that waits.
    """

    def __init__(self, start: Callable[[ExitStack], Workers], unused: ExitStack) -> None:
        self._start = start
        self._unused = unused
        self._waiting: Workers | None = None

    def start_ahead(self) -> Workers:
        """Start the next pair now, unless one waits already; return it."""
        if self._waiting is None:
            self._waiting = self._start(self._unused)
        return self._waiting

    def discard(self) -> None:
        """End the pair that waits."""
        self._waiting = None
        self._unused.pop_all().close()

    def take(self, stack: ExitStack) -> Workers:
        """The pair that waits, or else a new one; `stack` ends it."""
        if self._waiting is None:
            return self._start(stack)
        stack.enter_context(self._unused.pop_all())
        workers, self._waiting = self._waiting, None
        return workers


def available_cpus() -> int:
    """Number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

"""Which case an actor gets next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from workloads.case import Case

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Job:
    """A case to measure. attempt counts from 1; each death of a worker on it adds one."""

    case: Case
    attempt: int = 1

    @property
    def shape(self) -> Shape:
        return (self.case.gemm.n, self.case.gemm.k)

    def again(self) -> Job:
        return replace(self, attempt=self.attempt + 1)


class Backlog:
    """Jobs that wait, by weight shape: an actor keeps its shape, whose floor it has measured."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._waiting: dict[Shape, deque[Job]] = {}
        for case in cases:
            job = Job(case)
            self._waiting.setdefault(job.shape, deque()).append(job)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put_back(self, job: Job) -> None:
        """Return a job; it is the next of its shape."""
        self._waiting.setdefault(job.shape, deque()).appendleft(job)

    def take(self, last: Shape | None, busy: Iterable[Shape]) -> Job | None:
        """The next job for an actor; None: nothing waits.

        last: the shape it measured before, kept while it lasts. busy: shapes that other actors
        are on; one that nobody is on goes first, in the plan's order, and only then the longest.
        """
        if not self._waiting:
            return None
        if last is not None and last in self._waiting:
            return self._pop(last)
        taken = set(busy)
        free = next((shape for shape in self._waiting if shape not in taken), None)
        if free is not None:
            return self._pop(free)
        return self._pop(max(self._waiting, key=lambda shape: len(self._waiting[shape])))

    def _pop(self, shape: Shape) -> Job:
        jobs = self._waiting[shape]
        job = jobs.popleft()
        if not jobs:
            del self._waiting[shape]
        return job

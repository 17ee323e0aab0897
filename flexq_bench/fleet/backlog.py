"""Scheduling: the next job for a worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from flexq_bench.fleet.compare_jobs import CompareJob
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe

Shape = tuple[object, ...]
_FLOOR_S = 1.0  # approximate time of measuring a floor


@dataclass(frozen=True, slots=True)
class Job:
    """A case to measure, or commits to compare, for a run. expected_s 0: unknown.

    attempt 0: never leased. device: that it was leased to before; empty: none.
    """

    id: int
    run: str  # uuid
    task: Case | CompareJob
    repetition: int = 1
    expected_s: float = 0.0
    attempt: int = 0
    device: str = ""

    @property
    def shape(self) -> Shape:
        """Shape of the weights; of a comparison its commits, which are built once on a node."""
        if isinstance(self.task, CompareJob):
            return (self.task.base, self.task.head)
        return self.task.shape

    @property
    def name(self) -> str:
        """Key of the case; of a comparison its commits."""
        return self.task.name if isinstance(self.task, CompareJob) else self.task.key

    @property
    def measures_floor(self) -> bool:
        return isinstance(self.task, Case) and is_probe(self.task.kernel)

    @property
    def work(self) -> tuple[str, object]:
        """Equal for the repetitions of a case, which go to different devices."""
        return self.run, self.id if isinstance(self.task, CompareJob) else self.task.key

    def with_attempt(self, attempt: int) -> Job:
        return replace(self, attempt=attempt)


class Backlog:
    """Queued jobs for one kind of GPU, by weight shape.

    A worker keeps its shape, whose floor it has measured, until no jobs of the shape are left.
    Shapes are started in descending order of expected seconds, and so are the jobs of a shape after
    its floors: the last jobs are short, so that GPUs become idle at about the same time.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._waiting: dict[Shape, list[Job]] = {}  # the next job is the last of its list
        self._seconds: dict[Shape, float] = {}
        self._tried: dict[tuple[str, object], set[str]] = {}
        by_shape: dict[Shape, list[Job]] = {}
        for job in jobs:
            if job.device:
                self._tried.setdefault(job.work, set()).add(job.device)
            by_shape.setdefault(job.shape, []).append(job)
        for shape, members in by_shape.items():
            members.reverse()  # the next one is last; a stable sort keeps the order of the plan
            self._waiting[shape] = sorted(
                members, key=lambda job: (job.measures_floor, job.expected_s)
            )
            self._seconds[shape] = sum(job.expected_s for job in members)
        self._count = sum(map(len, self._waiting.values()))

    def __len__(self) -> int:
        return self._count

    def put_back(self, job: Job) -> None:
        """Put a job back; it becomes the next one of its shape."""
        self._waiting.setdefault(job.shape, []).append(job)
        self._seconds[job.shape] = self._seconds.get(job.shape, 0.0) + job.expected_s
        self._count += 1

    def has(self, shape: Shape | None) -> bool:
        return shape in self._waiting

    def take(
        self, device: str, last: Shape | None, busy: Collection[Shape], devices: int
    ) -> Job | None:
        """Remove and return the next job for a worker on this device; None: there is none.

        last: the shape that the worker measured before. busy: shapes that other workers are
        measuring. Shapes without a worker are preferred, then shared shapes for which another floor
        measurement pays off. devices: the number of devices; repetitions of a case, and further
        attempts at a job, go to different devices as long as some have not tried it.
        """
        for shape in self._preferred(last, busy):
            job = self._pop(shape, device, devices)
            if job is not None:
                return job
        return None

    def _preferred(self, last: Shape | None, busy: Collection[Shape]) -> Iterator[Shape]:
        if last is not None and self.has(last):
            yield last
        free = [shape for shape in self._waiting if shape not in busy]
        yield from sorted(free, key=self._seconds.__getitem__, reverse=True)
        shared = [shape for shape in busy if self._is_worth_sharing(shape)]
        yield from sorted(shared, key=self._seconds.__getitem__, reverse=True)

    def _is_worth_sharing(self, shape: Shape) -> bool:
        """Return True if one more worker would finish a job before the workers on it now."""
        waiting, seconds = self._waiting.get(shape, ()), self._seconds.get(shape, 0.0)
        return len(waiting) > 1 or (len(waiting) == 1 and not 0 < seconds < 2 * _FLOOR_S)

    def _pop(self, shape: Shape, device: str, devices: int) -> Job | None:
        """Remove and return the next job of the shape that is allowed on the device."""
        jobs = self._waiting[shape]
        allowed = (
            i for i in reversed(range(len(jobs))) if not self._is_excluded(jobs[i], device, devices)
        )
        index = next(allowed, None)
        if index is None:
            return None
        job = jobs.pop(index)
        if job.repetition > 1 or devices > 1:
            self._tried.setdefault(job.work, set()).add(device)
        self._seconds[shape] -= job.expected_s
        self._count -= 1
        if not jobs:
            del self._waiting[shape], self._seconds[shape]
        return job

    def _is_excluded(self, job: Job, device: str, devices: int) -> bool:
        tried = self._tried.get(job.work, ())
        return device in tried and len(tried) < devices

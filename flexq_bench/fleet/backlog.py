"""Choice of the next job for a worker."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from workloads.case import Case
from workloads.probes import is_probe

Shape = tuple[int, int]
_FLOOR_S = 1.0  # about what measuring a floor takes


@dataclass(frozen=True, slots=True)
class Job:
    """A case to measure for a run. expected_s: 0: not known. attempt: 0: not handed out yet."""

    id: int
    run: str  # uuid
    case: Case
    repetition: int = 1
    expected_s: float = 0.0
    attempt: int = 0

    @property
    def shape(self) -> Shape:
        return (self.case.gemm.n, self.case.gemm.k)

    def handed_out(self, attempt: int) -> Job:
        return replace(self, attempt=attempt)


class Backlog:
    """Jobs that wait for one kind of GPU, by weight shape.

    A worker keeps its shape, whose floor it has measured, while it lasts. Shapes go out by the
    seconds that they are expected to take, longest first, and so do the jobs of a shape after its
    floors: what is handed out last is short, so no GPU waits long for the last one.
    """

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self._waiting: dict[Shape, list[Job]] = {}  # each with the next job last
        self._seconds: dict[Shape, float] = {}
        self._tried: dict[tuple[str, str], set[str]] = {}
        by_shape: dict[Shape, list[Job]] = {}
        for job in jobs:
            by_shape.setdefault(job.shape, []).append(job)
        for shape, members in by_shape.items():
            members.reverse()  # the next one is last, and equals keep the order of the plan
            self._waiting[shape] = sorted(members, key=_urgency)
            self._seconds[shape] = sum(job.expected_s for job in members)
        self._count = sum(map(len, self._waiting.values()))

    def __len__(self) -> int:
        return self._count

    def put_back(self, job: Job) -> None:
        """Return a job; it is the next of its shape."""
        self._waiting.setdefault(job.shape, []).append(job)
        self._seconds[job.shape] = self._seconds.get(job.shape, 0.0) + job.expected_s
        self._count += 1

    def has(self, shape: Shape | None) -> bool:
        return shape in self._waiting

    def take(
        self, device: str, last: Shape | None, busy: Collection[Shape], devices: int
    ) -> Job | None:
        """The next job for a worker on this device; None: nothing waits for it.

        last: the shape it measured before. busy: shapes that other workers are on; one that nobody
        is on goes first, and only then the longest that is worth measuring its floor once more.
        devices: how many there are: repetitions of a case go to different ones while some have not
        had it.
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
        shared = [shape for shape in busy if self._needs_help(shape)]
        yield from sorted(shared, key=self._seconds.__getitem__, reverse=True)

    def _needs_help(self, shape: Shape) -> bool:
        """Return True if one more worker on the shape would end a job before those on it now."""
        waiting, seconds = self._waiting.get(shape, ()), self._seconds.get(shape, 0.0)
        return len(waiting) > 1 or (len(waiting) == 1 and not 0 < seconds < 2 * _FLOOR_S)

    def _pop(self, shape: Shape, device: str, devices: int) -> Job | None:
        """The next job of the shape that the device may have."""
        jobs = self._waiting[shape]
        allowed = (i for i in reversed(range(len(jobs))) if not self._had(jobs[i], device, devices))
        index = next(allowed, None)
        if index is None:
            return None
        job = jobs.pop(index)
        if job.repetition > 1 or devices > 1:
            self._tried.setdefault((job.run, job.case.key), set()).add(device)
        self._seconds[shape] -= job.expected_s
        self._count -= 1
        if not jobs:
            del self._waiting[shape], self._seconds[shape]
        return job

    def _had(self, job: Job, device: str, devices: int) -> bool:
        tried = self._tried.get((job.run, job.case.key), ())
        return device in tried and len(tried) < devices


def _urgency(job: Job) -> tuple[bool, float]:
    return (is_probe(job.case.kernel), job.expected_s)

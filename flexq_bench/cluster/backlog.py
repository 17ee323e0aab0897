"""Which job a worker gets next."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from flexq_bench.probes import EMPTY_KERNEL, is_probe
from workloads.case import Case

Shape = tuple[int, int]


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
    floors: what is handed out last is short, so no GPU waits long for the last one. The empty
    launch is the first of all: how long its few nanoseconds take to settle, 1 to 12 s on an H200,
    is chance, and nobody can share it.
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

    def take(
        self, device: str, last: Shape | None, busy: Collection[Shape], devices: int
    ) -> Job | None:
        """The next job for a worker on this device; None: nothing waits.

        last: the shape it measured before. busy: shapes that other workers are on; one that nobody
        is on goes first, and only then the longest. devices: how many there are: repetitions of a
        case go to different ones while some have not had it.
        """
        if last is not None and last in self._waiting:
            return self._pop(last, device, devices)
        if not self._waiting:
            return None
        free = [shape for shape in self._waiting if shape not in busy] or list(self._waiting)
        return self._pop(max(free, key=self._rank), device, devices)

    def _rank(self, shape: Shape) -> tuple[bool, float]:
        is_empty_launch = self._waiting[shape][-1].case.kernel == EMPTY_KERNEL
        return (is_empty_launch, self._seconds[shape])

    def _pop(self, shape: Shape, device: str, devices: int) -> Job:
        jobs = self._waiting[shape]
        index = len(jobs) - 1
        if devices > 1:
            fresh = (i for i in range(index, -1, -1) if not self._had(jobs[i], device, devices))
            index = next(fresh, index)
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

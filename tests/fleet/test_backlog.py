"""Scheduling of jobs."""

from __future__ import annotations

from flexq_bench.fleet.backlog import Backlog, Job
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

A, B, C = (256, 64), (512, 64), (768, 64)


def jobs(*shapes: tuple[int, int], seconds: tuple[float, ...] = ()) -> list[Job]:
    return [
        Job(m, "run", Case("cublas-fp16", GemmWorkload(m, n, k)), expected_s=expected)
        for m, ((n, k), expected) in enumerate(
            zip(shapes, seconds or (1.0,) * len(shapes), strict=True), start=1
        )
    ]


def take(backlog, last=None, busy=(), device="d0", devices=1):
    return backlog.take(device, last, busy, devices)


def test_worker_keeps_its_shape_until_no_jobs_are_left():
    backlog = Backlog(jobs(A, B, A, B))

    assert [take(backlog, B).shape for _ in range(4)] == [B, B, A, A]
    assert take(backlog, B) is None


def test_longest_shape_without_a_worker_comes_first():
    backlog = Backlog(jobs(A, B, C, seconds=(9.0, 1.0, 5.0)))

    assert take(backlog, busy=[A]).shape == C


def test_longest_shape_is_shared_if_every_shape_has_a_worker():
    backlog = Backlog(jobs(A, B, B))

    assert take(backlog, C, busy=[A, B]).shape == B


def test_short_last_job_of_a_shape_is_not_shared():
    assert take(Backlog(jobs(A, seconds=(1.5,))), B, busy=[A]) is None
    assert take(Backlog(jobs(A, seconds=(15.0,))), B, busy=[A]).shape == A
    assert take(Backlog(jobs(A, seconds=(0.0,))), B, busy=[A]).shape == A  # nobody knows


def test_repetition_goes_to_a_gpu_without_that_case():
    [job] = jobs(A)
    backlog = Backlog([job, Job(2, job.run, job.task, repetition=2)])
    take(backlog, device="d0", devices=2)

    assert take(backlog, A, device="d0", devices=2) is None
    assert take(backlog, device="d1", devices=2).repetition == 2


def test_floors_come_before_their_kernels():
    floor = Job(9, "run", Case("read-6", GemmWorkload(1, *A)), expected_s=0.1)
    backlog = Backlog([*jobs(A, A, seconds=(3.0, 4.0)), floor])

    assert [take(backlog, A).id for _ in range(3)] == [9, 2, 1]


def test_requeued_job_is_the_next_of_its_shape():
    backlog = Backlog(jobs(A, A))
    lost = take(backlog)

    backlog.put_back(lost)

    assert take(backlog, A) == lost
    assert len(backlog) == 1


def test_equal_jobs_keep_the_order_of_the_plan():
    backlog = Backlog(jobs(A, A, A))

    assert [take(backlog, A).id for _ in range(3)] == [1, 2, 3]

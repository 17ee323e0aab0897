"""Who gets which case next."""

from __future__ import annotations

from flexq_bench.cluster.backlog import Backlog
from workloads.case import Case
from workloads.gemm import GemmWorkload

A, B, C = (256, 64), (512, 64), (768, 64)


def cases(*shapes: tuple[int, int]) -> list[Case]:
    return [Case("cublas-fp16", GemmWorkload(m, n, k)) for m, (n, k) in enumerate(shapes, start=1)]


def test_an_actor_keeps_its_shape_while_it_lasts():
    backlog = Backlog(cases(A, B, A, B))

    assert [backlog.take(B, busy=[]).shape for _ in range(4)] == [B, B, A, A]
    assert backlog.take(B, busy=[]) is None


def test_a_free_actor_takes_the_first_shape_that_nobody_is_on():
    backlog = Backlog(cases(A, A, B, C))

    assert backlog.take(None, busy=[A]).shape == B


def test_where_every_shape_has_an_actor_the_longest_gets_help():
    backlog = Backlog(cases(A, B, B))

    assert backlog.take(C, busy=[A, B]).shape == B


def test_a_job_put_back_is_the_next_of_its_shape_at_its_next_attempt():
    backlog = Backlog(cases(A, A))
    lost = backlog.take(None, busy=[])

    backlog.put_back(lost.again())

    job = backlog.take(A, busy=[])
    assert (job.case, job.attempt) == (lost.case, 2)
    assert len(backlog) == 1

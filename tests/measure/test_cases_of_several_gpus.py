"""Cases of several GPUs: a process on each, here gloo's on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.measure import Meter, Tuning
from flexq_bench.measure import meter as meters
from flexq_bench.measure.rank_worker import RankOperations
from flexq_bench.measure.worker_process import WorkerError
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import operation

CPU = torch.device("cpu")


def all_reduce(elements, gpus=2, **fields):
    workload = operation("all_reduce").workload(elements=elements, gpus=gpus)
    return Case("all-reduce", workload, stage="op", **fields)


class Alike(Ranks):
    """Two ranks with the same vectors, of which this is the first; `add` as given."""

    count = 2

    def __init__(self, add):
        self._add = add

    def add(self, x):
        return self._add(x)

    def joined(self, x):
        return torch.cat([x, x], dim=1)

    def exchange(self, sent, received):
        received.copy_(sent)


@pytest.mark.slow
def test_sums_of_two_processes_are_timed_checked_and_have_a_floor():
    meter = Meter("cpu", tuning=Tuning.NONE)
    try:
        results = [meter.measure(all_reduce(n)) for n in (8192, 1 << 18)]
    finally:
        meter._ranked.end()

    for result in results:
        assert result.status in ("ok", "noisy"), result.detail
        assert result.max_rel_error is not None
        assert 0 < result.floor_us < result.median_us
        assert len(result.extra["devices"]) == 2
    assert results[1].floor_us == pytest.approx(32 * results[0].floor_us)


# The vectors of ranks are not equal.
@pytest.mark.parametrize("add", [lambda x: x, lambda x: x.mul_(2)], ids=["alone", "doubled"])
def test_a_sum_that_lacks_the_other_ranks_vector_is_found(add):
    operations = RankOperations(CPU, Alike(add))
    operations.prepare(all_reduce(4096).key, 0, 1)

    assert operations.check("before")["detail"]
    operations.place(0)
    operations.sample(2)
    assert operations.inspect()["detail"]


def test_a_machine_with_too_few_gpus_is_a_stated_outcome(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    meter.backend, meter.capability = "cuda", (9, 0)
    monkeypatch.setattr(meters, "device_infos", lambda name, count: [meter.device_info])

    with pytest.raises(meters.UnsupportedError, match=r"needs 2 GPUs of a host, .* first of 1"):
        meter._check_supported(registry.resolve("all-reduce", "cuda").spec, all_reduce(64))


def test_a_function_of_one_gpu_is_not_given_two(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    meter.backend, meter.capability = "cuda", (9, 0)
    monkeypatch.setattr(meters, "device_infos", lambda name, count: [meter.device_info] * 2)
    spec = replace(registry.resolve("all-reduce", "cuda").spec, source_hash="a" * 64)

    with pytest.raises(meters.UnsupportedError, match="is a function of one GPU"):
        meter._check_supported(spec, all_reduce(64))


@pytest.mark.slow
def test_ranks_that_die_fail_one_case_only(monkeypatch):
    meter = Meter("cpu", tuning=Tuning.NONE)
    try:
        prepared = meter._ranked.prepared(all_reduce(4096), 0, 1)
        prepared._ranks._processes[1].kill()
        # Either comes first.
        with pytest.raises(WorkerError, match=r"died|closed by peer"):
            prepared.check("before")
        assert meter._ranked.prepared(all_reduce(4096), 0, 1).check("before").detail == ""
    finally:
        meter._ranked.end()

"""A pool of devices on which all cases take the same time."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from flexq_bench.db.records import DeviceInfo
from flexq_bench.fleet.local_pool import carry_out_comparisons
from flexq_bench.measure import Measured
from flexq_bench.runs.machine import Machine
from flexq_bench.runs.record import build_record
from flexq_bench.runs.worker import Worker
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Group, Shape, Suite

SUITE = Suite("made", "", "", (Group(("flexq-w6a6",), (1,), (Shape(256, 256, "o_proj"),)),))
IDENTITY = (
    *("protocol_version", "input_distribution", "kernel_version"),
    *("weight_bits", "act_bits", "group"),
)


@dataclass
class Kind:
    gpu: str
    backend: str = "cpu"
    capability: None = None
    devices: int = 1


def unseen(total):
    assert total > 0, "a night without a case to come was begun"
    return nullcontext(lambda record: None)


class MadePool:
    """Kinds of device on which every case takes `us`; what it was asked for is kept."""

    def __init__(self, database, commit, compared, us=20.0, gpus=("A CPU",)):
        self.database, self.commit, self.us = database, commit, us
        self.kinds = [Kind(gpu) for gpu in gpus]
        self.measured, self.contests, self._compared = [], [], compared
        self.refusals, self.refused_gpus = {}, {}

    def measure(self, works, on_record):
        for one in works:
            for case in one.cases:
                self.measured.append((one.gpu, case.key))
                machine = self.machine(one.gpu)
                identity = {name: machine.series_of(case)[name] for name in IDENTITY}
                found = Measured("ok", "", 0, median_us=self.us, **identity)
                record = build_record(case, found, one.run.info, self.commit, machine.device, {})
                one.run.add(record)

    def refusal(self, gpu):
        return self.refusals.get(gpu, "")

    def machine(self, gpu):
        return Machine("cpu", DeviceInfo(f"{gpu} 1", gpu, "cpu"), self.commit.project)

    def compare(self, works, on_compared):
        for work in works:
            worker = Worker(self.machine(work.gpu).device, {"host": "here"}, None, 1)

            def compare(job, work):
                return self.compare_now(work.gpu, job.base, job.head, job.cases)

            carry_out_comparisons(self.database, worker, [work], compare, on_compared)

    def compare_now(self, gpu, base, head, cases):
        self.contests.append((base, head, [case.key for case in cases]))
        order = {sha: int(sha, 16) for sha in (base, head)}
        return [
            self._compared(
                case.kernel,
                1.0 if base == head or is_probe(case.kernel) else self.us / 20.0,
                base=order[base],
                head=order[head],
                shape=(case.gemm.m, case.gemm.n, case.gemm.k),
                cache=case.cache,
            )
            for case in cases
        ]

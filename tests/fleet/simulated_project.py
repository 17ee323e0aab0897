"""Devices that take as long for a project's kernels as their padding says, and noise.

What they know of a commit is what reached their node: a clone, unpacked there.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

from flexq_bench.db.records import DeviceInfo
from flexq_bench.fleet.compare_jobs import Compared, CompareJob
from flexq_bench.fleet.ray_workers import WorkerDescription
from flexq_bench.fleet.shipped_kernels import ShippedKernels
from flexq_bench.fleet.shipped_repository import ShippedRepository
from flexq_bench.fleet.workers import Report
from flexq_bench.measure import Measured
from flexq_bench.repository.git import git_output
from flexq_bench.runs.worker import Worker
from flexq_bench.verdicts import CaseComparison, Comparison, confirm
from flexq_bench.workloads.case import Case

FILE = "kernels/torch_kernels.py"
SIGMA = 0.004  # of a night; processes have half of it


def simulated_devices(identities: Mapping[str, Mapping[str, Any]]) -> tuple[type, type]:
    """Classes of actors that measure and that compare, which Ray carries to the nodes by value.

    identities: fields of Measured that make a series, by kernel.
    """

    def describe() -> WorkerDescription:
        import ray

        node = ray.get_runtime_context().get_node_id()
        resources = next(n["Resources"] for n in ray.nodes() if n["NodeID"] == node)
        kind = next(r for r in resources if r.startswith("accelerator_type:"))
        sku = kind.removeprefix("accelerator_type:")
        device = DeviceInfo(f"GPU-{sku}", sku, "cuda", compute_capability="8.6")
        return WorkerDescription(Worker(device, {"host": sku}, (8, 6), os.getpid()), "simulated")

    def time_us(repository: ShippedRepository, commit: str) -> float:
        source = git_output(repository.unpacked(), "show", f"{commit}:{FILE}")
        [padding] = [row.split()[2] for row in source.splitlines() if row.startswith("PADDING_")]
        return 20 * (1 + int(padding) / 100)

    def drawn(us: float, sigma: float, *seed: object) -> float:
        return us * random.Random(" ".join(map(str, seed))).lognormvariate(0, sigma)

    class Meter:
        def __init__(self, backend: str, seed: int, tuning: str, kernels: ShippedKernels) -> None:
            assert kernels.repository is not None
            self._description, self._name = describe(), kernels.revision
            self._us = time_us(kernels.repository, kernels.repository.checkouts[self._name])

        def describe(self) -> WorkerDescription:
            return self._description

        def memory_obstacles(self, cases: tuple[Case, ...]) -> dict[str, str]:
            return {}

        def measure(self, case: Case, choices: tuple[object, ...]) -> Report:
            us = self._us if "." in case.kernel else 10.0
            gpu = self._description.worker.device.sku
            us = drawn(us, SIGMA, gpu, self._name, case.key)
            own = identities[case.kernel]
            return Report(Measured("ok", "", 0, median_us=us, n_samples=50, **own))

    class Comparer:
        def __init__(self, backend: str, seed: int, tuning: str, kernels: ShippedKernels) -> None:
            self._description = describe()

        def describe(self) -> WorkerDescription:
            return self._description

        def beat(self) -> None:
            pass

        def compare(self, job: CompareJob, repository: ShippedRepository, rules: Any) -> Compared:
            ends = [time_us(repository, commit) for commit in (job.base, job.head)]
            return Compared(tuple(self._compared(case, job, ends) for case in job.cases))

        def _compared(self, case: Case, job: CompareJob, ends: list[float]) -> CaseComparison:
            sides = [
                tuple(drawn(us, SIGMA / 2, case.key, job.name, side, i) for i in range(24))
                for side, us in enumerate(ends if "." in case.kernel else [10.0, 10.0])
            ]
            blocks = Comparison(sides[0], sides[1], placement=tuple(i // 2 for i in range(24)))
            return CaseComparison(case, job.base, job.head, blocks, confirm(blocks))

    return Meter, Comparer

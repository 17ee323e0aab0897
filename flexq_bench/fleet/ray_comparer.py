"""A Ray actor that compares two commits on the GPU assigned to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Tuning
from flexq_bench.measure.ab import InterleaveRules, Suffices, compare_commits
from flexq_bench.measure.external_kernels import adopt, log_failures
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case


class ComparerActor:
    """Starts the worker processes of both commits, which see the same GPU as this process."""

    def __init__(
        self,
        backend: Backend,
        seed: int,
        tuning: Tuning,
        kernels_from: Sequence[KernelSource] = (),
    ) -> None:
        adopt(kernels_from)
        log_failures()
        self._device = "cpu" if backend == "cpu" else "cuda:0"

    def compare(
        self,
        repository: Path,
        base: str,
        head: str,
        cases: Sequence[Case],
        seed: int,
        suffices: Suffices | None,
    ) -> list[CaseComparison]:
        rules = InterleaveRules(suffices=suffices)
        return list(
            compare_commits(
                repository, base, head, cases, device=self._device, seed=seed, rules=rules
            )
        )

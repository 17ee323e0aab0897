"""Interleaved A/B measurement of two kernels in one process, over the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import flexq_bench
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, Options, Side
from flexq_bench.measure.device import find_device
from flexq_bench.measure.external_kernels import sandbox_of_adopted
from flexq_bench.measure.launcher import OWN_LIBRARIES, forking_launcher
from flexq_bench.verdicts import CaseComparison
from flexq_bench.workloads.case import Case, parse_kernel_label


def compare_kernels(
    base: str,
    head: str,
    cases: Sequence[Case],
    **options: Unpack[Options],
) -> Iterator[CaseComparison]:
    """Yield one result per case of `cases`, whose own kernels are ignored.

    base, head: labels, of the code that runs now. Both have the same real values, and share weight
    buffers if they pack them into the same bytes. A pair of processes is one process here. Raises
    WorkloadError for an invalid label, DeviceError, WorkerError if a worker does not start.
    """
    find_device(options.get("device", "cuda"))
    tree = Path(flexq_bench.__file__).resolve().parents[1]
    pairs = dict.fromkeys((_with_label(case, base), _with_label(case, head)) for case in cases)
    sandbox = sandbox_of_adopted(tree)
    with forking_launcher(tree, sandbox.wrap, libraries=OWN_LIBRARIES) as launcher:
        first, second = (
            Side(label, tree, launcher=launcher, sandbox=sandbox) for label in (base, head)
        )
        experiment = ABExperiment(first, second, one_process=True, **options)
        yield from compare_cases([(experiment, list(pairs))])


def _with_label(case: Case, label: str) -> Case:
    kernel, variant = parse_kernel_label(label)
    return replace(case, kernel=kernel, variant=variant)

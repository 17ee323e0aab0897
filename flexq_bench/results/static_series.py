"""Records of static metrics of this tree's kernels, one value per series and commit.

All builds, targets and metrics would be tens of thousands of numbers a night, most of them of
configurations that are never chosen. For each kernel and target, only two kinds of values are
stored: the metrics of its default configuration, for one token and for a full block of tokens; and
the worst value of each resource over all its builds, so that no spill is missed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from flexq_bench.db.identity import content_uuid
from flexq_bench.db.records import CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.kernels.contract import KernelSpec
from flexq_bench.kernels.registry import labels, resolve
from flexq_bench.kernels.resource_table import resource_rows
from flexq_bench.kernels.runtime.gpu import OF_TARGET, chosen_for
from flexq_bench.kernels.runtime.machine_code import instructions, resources
from flexq_bench.kernels.runtime.nvrtc import COMMON_OPTIONS, Build, compile_build, compiler_version
from flexq_bench.kernels.runtime.resource_row import ResourceRow, resource_row
from flexq_bench.measure.machine_code import SUITE
from flexq_bench.measure.machine_code.metrics import (
    RESOURCES,
    WARPS_PER_SM,
    Metric,
    instruction_values,
    resource_values,
)
from flexq_bench.measure.machine_code.revision_builds import DEFAULT_SHAPES
from flexq_bench.runs.record import UNTIMED, record_uuid
from flexq_bench.workloads.gemm import GemmWorkload

BACKEND = "static"
VERSION = 1  # of the definition and selection of metrics
_ALL_BUILDS = GemmWorkload(1, 1, 1)  # placeholder shape of the worst value over all builds

OnStep = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StaticValue:
    """One value of one kernel on one target. build: the build that has this value."""

    spec: KernelSpec
    target: str
    shape: GemmWorkload
    metric: Metric
    value: float
    build: Build
    binary_hash: str | None

    @property
    def case(self) -> str:
        """The key within a run, for example `flexq-w6a6 static sm_86 m1n4096k4096 registers`."""
        g = self.shape
        name = f"{self.spec.label} {BACKEND} {self.target}"
        return f"{name} m{g.m}n{g.n}k{g.k} {self.metric.name}"


def kernels_with_code() -> tuple[str, ...]:
    """Labels of the kernels that compile CUDA sources of this repository."""
    return tuple(label for label in labels("cuda") if resolve(label, "cuda").builds())


def static_values(
    chosen: Iterable[str], targets: Sequence[str], on_step: OnStep = lambda _label: None
) -> Iterator[StaticValue]:
    """Compute the values to store of these kernels. Raises CompileError, UnsupportedError."""
    for label in chosen:
        on_step(label)
        spec = resolve(label, "cuda").spec
        for target in targets:
            number = int(target.removeprefix("sm_"))
            if spec.min_capability <= divmod(number, 10) <= spec.max_capability:
                yield from _defaults(label, target)
                yield from _worst(label, target)


def static_run(commit: CommitInfo, values: Iterable[StaticValue]) -> RunInfo:
    """The run of one commit; its uuid depends only on the code, the compiler and the cases.

    It has no plan: its values are stored in one transaction, so none can be missing.
    """
    cases = sorted(value.case for value in values)
    salt = uuid.uuid4().hex if commit.dirty else ""
    key = f"{SUITE} {VERSION} {commit.sha} {_environment()} {cases} {salt}"
    identity = content_uuid(key)
    return RunInfo(
        uuid=identity,
        suite=SUITE,
        trigger="manual",
        status="complete",
        created_at=datetime.now(UTC).isoformat(),
        idempotency_key=identity,
    )


def static_record(value: StaticValue, run: RunInfo, commit: CommitInfo) -> Record:
    """The record of one value; accepted unless the tree is dirty."""
    spec, shape, metric = value.spec, value.shape, value.metric
    number = int(value.target.removeprefix("sm_"))
    return Record(
        uuid=record_uuid(run.uuid, value.case, 1),
        case=value.case,
        kernel=spec.name,
        variant=spec.variant,
        kernel_version=spec.version,
        backend=BACKEND,
        stage="gemm",
        cache="",
        metric=metric.name,
        unit=metric.unit,
        direction=metric.direction,
        m=shape.m,
        n=shape.n,
        k=shape.k,
        weight_bits=spec.weight.bits,
        act_bits=spec.activation.bits,
        group=spec.weight.group,
        protocol_version=VERSION,
        gpu=value.target,
        status="ok",
        detail="",
        median_us=value.value,
        ci_low_us=value.value,
        ci_high_us=value.value,
        n_samples=1,
        samples_us=(),
        tops=None,
        accepted=not commit.dirty,
        config={name.lower(): define for name, define in value.build.defines},
        binary_hash=value.binary_hash,
        created_at=run.created_at,
        run=run,
        commit=commit,
        device=DeviceInfo(
            uuid=value.target,
            sku=value.target,
            backend=BACKEND,
            compute_capability=f"{number // 10}.{number % 10}",
        ),
        environment=_environment(),
        extra={"build": value.build.name},
        **UNTIMED,
    )


def _environment() -> dict[str, str]:
    """The compiler and its flags; if they change, a new epoch begins."""
    return {"nvrtc": compiler_version(), "compiler_flags": " ".join(COMMON_OPTIONS)}


def _defaults(label: str, target: str) -> Iterator[StaticValue]:
    kernel = resolve(label, "cuda")
    for shape in DEFAULT_SHAPES:
        with chosen_for(OF_TARGET[target]):
            builds = kernel.builds_for(shape, None)
        for build in builds:
            if build.block is None or not build.runs_on(target):
                continue
            cubin = compile_build(build, target)
            function = build.block.function
            row = resource_row(build, target, function, resources(cubin)[function])
            values = resource_values(row) | instruction_values(instructions(cubin)[function])
            for metric, value in values.items():
                yield StaticValue(kernel.spec, target, shape, metric, value, build, cubin.hash)


def _worst(label: str, target: str) -> Iterator[StaticValue]:
    kernel = resolve(label, "cuda")
    builds = [build for build in kernel.builds() if build.runs_on(target)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows_by_build = list(pool.map(lambda build: resource_rows(build, target), builds))
    worst: dict[Metric, tuple[float, Build]] = {}
    for build, rows in zip(builds, rows_by_build, strict=True):
        for metric, value in (item for row in rows for item in _values_of_row(row).items()):
            previous = worst.get(metric)
            if previous is None or _is_worse(metric, value, previous[0]):
                worst[metric] = (value, build)
    for metric in RESOURCES:
        if metric in worst:
            value, build = worst[metric]
            worst_metric = replace(metric, name=f"worst_{metric.name}")
            yield StaticValue(kernel.spec, target, _ALL_BUILDS, worst_metric, value, build, None)


def _values_of_row(row: ResourceRow) -> Mapping[Metric, float]:
    """The resource values; without occupancy if no block fits an SM, as such a build is never a
    candidate."""
    values = resource_values(row)
    return values if row.fits else {m: v for m, v in values.items() if m != WARPS_PER_SM}


def _is_worse(metric: Metric, value: float, previous: float) -> bool:
    return value > previous if metric.direction == "lower" else value < previous

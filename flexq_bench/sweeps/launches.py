"""Sweeps over the launches of a trace, and times of kernels weighted by their counts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from flexq_bench.errors import UsageError
from flexq_bench.stats.baseline import Result
from flexq_bench.sweeps.sweep import CACHES, STAGES, select_words
from flexq_bench.sweeps.text import split_names
from flexq_bench.workloads.case import kernel_label, workload_of
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.launches import Launch, LaunchTrace
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Group, OperationGroup, Shape, Suite

_ALL_KERNELS = ("*",)
_MAX_REASONS = 6
_MAX_LAYER_CHARS = 64


@dataclass(frozen=True, slots=True)
class WeightedTime:
    """Time of a kernel on the launches of an operation: the sum of count times median.

    measured, launches: number of calls of the measured workloads, and of all of this operation.
    shapes, of_shapes: number of workloads likewise. us: of the measured calls, in a step.
    traced_us: of the same calls, as traced; None: the trace has no times.
    """

    operation: str
    label: str
    stage: str
    cache: str
    measured: float
    launches: float
    shapes: int
    of_shapes: int
    us: float
    traced_us: float | None


def launch_suite(
    launches: Sequence[Launch], *, kernels: Sequence[str] | None, stage: str, cache: str
) -> Suite:
    """Return a suite of the workloads: every kernel on each; None: all kernels.

    Raises UsageError if there is none, or for an unknown stage or cache mode.
    """
    if not launches:
        raise UsageError("the trace has no call that can be measured: see what it has above")
    labels = tuple(kernels or _ALL_KERNELS)
    stages = select_words("stage", split_names(stage) or (), STAGES)
    caches = select_words("cache", split_names(cache) or (), CACHES)
    sizes: dict[tuple[int, int], dict[int, str]] = {}
    others: dict[str, list[Launch]] = {}
    for launch in launches:
        if isinstance(launch.workload, GemmWorkload):
            shape = sizes.setdefault((launch.workload.n, launch.workload.k), {})
            shape[launch.workload.m] = launch.source
        else:
            others.setdefault(launch.source, []).append(launch)
    groups: list[Group | OperationGroup] = []
    for (n, k), of_m in sizes.items():
        layer = _layer(next(iter(of_m.values())))
        groups.append(Group(labels, tuple(sorted(of_m)), (Shape(n, k, layer),), stages, caches))
    for source, parts in others.items():
        workloads = tuple(
            part.workload for part in parts if not isinstance(part.workload, GemmWorkload)
        )
        groups.append(OperationGroup(labels, workloads, caches, layer=_layer(source)))
    return Suite("sweep", "launches of a trace", "", tuple(groups))


def weighted_times(results: Iterable[Result], trace: LaunchTrace) -> list[WeightedTime]:
    """Return the weighted time of each kernel in a step, by operation and coverage.

    Without steps in the trace, the whole trace is one.
    """
    steps = trace.steps or 1
    of_workload = {launch.workload: launch for launch in trace.launches}
    totals: dict[str, list[int]] = {}
    for launch in trace.launches:
        total = totals.setdefault(launch.workload.operation, [0, 0])
        total[0] += launch.count
        total[1] += 1
    times: dict[tuple[str, str, str, str], dict[Launch, float]] = {}
    for result in results:
        if result.median_us is None or result.status == "incorrect" or is_probe(result.kernel):
            continue
        measured = of_workload.get(workload_of(result.operation, result.parameters))
        if measured is None:
            continue
        label = kernel_label(result.kernel, result.variant)
        key = (result.operation, label, result.stage, result.cache)
        times.setdefault(key, {})[measured] = result.median_us
    rows = []
    for (operation, label, stage, cache), by_launch in times.items():
        traced = [launch.traced_us for launch in by_launch]
        calls, shapes = totals[operation]
        rows.append(
            WeightedTime(
                operation,
                label,
                stage,
                cache,
                sum(launch.count for launch in by_launch) / steps,
                calls / steps,
                len(by_launch),
                shapes,
                sum(launch.count * us for launch, us in by_launch.items()) / steps,
                None if None in traced else sum(us or 0.0 for us in traced) / steps,
            )
        )
    return sorted(rows, key=lambda row: (row.operation, -row.measured, row.us))


def weighted_table(results: Iterable[Result], trace: LaunchTrace) -> Table:
    """Tabulate weighted times, with a rule between operations."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    of = "step" if trace.steps else "trace"
    for name in ("operation", "kernel", "stage"):
        table.add_column(name, no_wrap=True)
    for name in ("shapes", f"calls/{of}", f"µs/{of}", f"traced µs/{of}"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = weighted_times(results, trace)
    for i, row in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].operation != row.operation
        table.add_row(
            row.operation,
            row.label,
            row.stage if row.cache == "cold" else f"{row.stage} {row.cache}",
            f"{row.shapes} of {row.of_shapes}",
            f"{row.measured:.6g} of {row.launches:.6g}",
            f"{row.us:.5g}",
            "" if row.traced_us is None else f"{row.traced_us:.5g}",
            end_section=last,
        )
    return table


def summary_lines(trace: LaunchTrace) -> list[str]:
    """Describe a trace: what is measured, and what is not, the most costly first."""
    calls = sum(launch.count for launch in trace.launches)
    steps = "" if trace.steps is None else f" in {trace.steps:,} steps"
    lines = [f"{len(trace.launches):,} workloads, {calls:,} calls{steps}"]
    total = trace.traced_us
    if total:
        known = sum(launch.traced_us or 0.0 for launch in trace.launches)
        lines[0] += f", {100 * known / total:.1f} % of the traced time"
    for part in trace.unmeasured[:_MAX_REASONS]:
        share = f"{100 * (part.traced_us or 0.0) / total:.1f} %, " if total else ""
        lines.append(f"not measured: {share}{part.count:,} × {part.source}: {part.reason}")
    if len(trace.unmeasured) > _MAX_REASONS:
        lines.append(f"not measured: {len(trace.unmeasured) - _MAX_REASONS} others")
    return lines


def _layer(source: str) -> str:
    """Return a name in a trace as a layer has it: `aten::linear` as linear."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", source.rpartition("::")[2])[:_MAX_LAYER_CHARS]

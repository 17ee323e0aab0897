"""Cases of a comparison: a suite, narrowed by options, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexq_bench.cli.external import with_external
from flexq_bench.cli.measuring import backend_of
from flexq_bench.cli.options import BackendChoice
from flexq_bench.errors import UsageError
from flexq_bench.fleet import device_name
from flexq_bench.kernels.contract import Backend
from flexq_bench.measure.device import capability, find_device
from flexq_bench.runs.plan import build_plan
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.suite import Suite
from flexq_bench.workloads.suites import load_suite


@dataclass(frozen=True, slots=True)
class CaseSelection:
    """A suite and its restrictions. restrictions: arguments of Suite.restrict, without m."""

    suite: str
    m: Sequence[int] | None
    restrictions: Mapping[str, Sequence[str] | None]


def chosen_device(backend: BackendChoice, device: str | None) -> str:
    """The requested device, else the default one. Raises UsageError."""
    name = device_name(backend_of(backend), device)
    find_device(name)
    return name


def chosen_cases(selection: CaseSelection, device: str) -> tuple[Case, ...]:
    """The selected cases of a suite; probes only if kernels are given."""
    kernels = selection.restrictions.get("kernels") or ()
    return cases_of_suite(with_external(load_suite(selection.suite), kernels), selection, device)


def cases_of_suite(suite: Suite, selection: CaseSelection, device: str) -> tuple[Case, ...]:
    """The selected cases of a loaded suite; see chosen_cases."""
    kernels = selection.restrictions.get("kernels") or ()
    suite = suite.restrict(m=selection.m, **selection.restrictions)
    return _planned(suite, device, kernels, keep_probes=bool(kernels))


def chosen_shapes(selection: CaseSelection, label: str, device: str) -> tuple[Case, ...]:
    """Cases of one kernel on the shapes of a suite, independent of the suite's kernels."""
    if selection.restrictions.get("kernels"):
        raise UsageError("the kernels are BASE and HEAD: leave out --kernels")
    suite = load_suite(selection.suite).restrict(m=selection.m, **selection.restrictions)
    groups = tuple(
        replace(group, kernels=(label,))
        for group in suite.groups
        if not all(map(is_probe, group.kernels))
    )
    return _planned(replace(suite, groups=groups), device, (label,), keep_probes=True)


def _planned(
    suite: Suite, device: str, kernels: Sequence[str], *, keep_probes: bool
) -> tuple[Case, ...]:
    opened = find_device(device)
    backend: Backend = "cpu" if opened.type == "cpu" else "cuda"
    plan = build_plan(suite, backend, capability(opened), requested_kernels=kernels)
    offered = list(dict.fromkeys(case.label for case in plan.cases))
    # Without the probes that a plan adds: comparisons don't need them.
    cases = (c for c in suite.cases(offered) if keep_probes or not is_probe(c.kernel))
    chosen = tuple(cases)
    if not chosen:
        raise UsageError(
            f"nothing to compare: all remaining cases of suite {suite.name} are probes"
        )
    return chosen

"""Plan of a run: a suite's cases on one backend, and their probes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from flexq_bench.errors import UsageError
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend, Capability, KernelSpec
from flexq_bench.kernels.errors import KernelError, UnsupportedError
from flexq_bench.workloads.case import Case, parse_kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.names import listed, nearest_first
from flexq_bench.workloads.patterns import is_glob, matches
from flexq_bench.workloads.probes import EMPTY_KERNEL, floor_kernel, is_probe
from flexq_bench.workloads.suite import Shape, Suite

_EMPTY_SHAPE = GemmWorkload(1, 1, 1)


@dataclass(frozen=True, slots=True)
class Plan:
    """Cases in the order of measurement: by number of GPUs, grouped by shape, floors first.

    skipped: labels of the suite that this backend doesn't have.
    """

    suite: str
    backend: Backend
    cases: tuple[Case, ...]
    skipped: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(case.key for case in self.cases)


def build_plan(
    suite: Suite,
    backend: Backend,
    capability: Capability | None,
    *,
    requested_kernels: Sequence[str] = (),
) -> Plan:
    """Plan a suite on a backend, with the read floor of every weight width and shape.

    capability: of the GPU; globs exclude kernels that it can't run, explicit labels are included
    and recorded as unsupported. External kernels are planned in the stages that they have, unless
    they have none of the suite's. requested_kernels: labels or globs given by the user, which,
    unlike those of a suite file, must exist. Raises UsageError if one doesn't (with similar names)
    or if there is nothing to measure.
    """
    for pattern in requested_kernels:
        _check_exists(pattern, backend)
    offered = offered_labels(suite, backend, capability, requested_kernels=requested_kernels)
    cases = fitting(suite.cases(offered), backend)
    skipped = suite.unmatched(offered)
    if not cases:
        raise UsageError(_nothing_left(suite, backend, skipped, offered, requested_kernels))
    return Plan(suite.name, backend, with_probes(cases, backend), skipped)


def offered_labels(
    suite: Suite,
    backend: Backend,
    capability: Capability | None,
    *,
    requested_kernels: Sequence[str] = (),
) -> tuple[str, ...]:
    """The backend's kernels that a suite's plan may contain; arguments as of `build_plan`."""
    named = {pattern for pattern in (*suite.kernels, *requested_kernels) if not is_glob(pattern)}
    return tuple(
        label
        for label in registry.labels(backend)
        if label in named or _matches_globs(label, backend, capability)
    )


def with_probes(cases: Sequence[Case], backend: Backend) -> tuple[Case, ...]:
    """Add probes: `empty` once, and before each shape the `read-<bits>` floor of every weight width
    measured on it, in the same cache mode.
    """
    available = registry.labels(backend)
    planned = dict.fromkeys(cases)
    probes: dict[Case, None] = {}
    if EMPTY_KERNEL in available and not any(case.kernel == EMPTY_KERNEL for case in cases):
        probes[Case(EMPTY_KERNEL, _EMPTY_SHAPE)] = None
    for case in cases:
        floor = _floor_of(case, backend)
        if floor is not None and floor.label in available and floor not in planned:
            probes.setdefault(floor)
    position = {shape: i for i, shape in enumerate(dict.fromkeys(case.shape for case in cases))}

    def order(case: Case) -> tuple[int, int, bool]:
        return (case.gpus, position.get(case.shape, -1), not is_probe(case.kernel))

    return tuple(sorted((*probes, *planned), key=order))


def cases_of_keys(keys: Iterable[str], shapes: Iterable[Shape]) -> tuple[Case, ...]:
    """Parse stored keys; model and layer are those of the first of `shapes` with the same N and K.

    Raises WorkloadError for an invalid key.
    """
    names: dict[tuple[object, ...], Shape] = {}
    for shape in shapes:
        names.setdefault((shape.n, shape.k), shape)
    cases = []
    for case in map(Case.from_key, keys):
        named = names.get(case.shape)
        if named is not None:
            case = replace(case, model=named.model, layer=named.layer)
        cases.append(case)
    return tuple(cases)


def _floor_of(case: Case, backend: Backend) -> Case | None:
    spec = _spec(case.label, backend)
    if spec is None or not spec.reads_weights or is_probe(spec.name):
        return None
    if not isinstance(case.workload, GemmWorkload):
        return None  # measured with its result, at the bytes of the operation
    kernel, variant = parse_kernel_label(
        floor_kernel(spec.weight.bits, overlaps=spec.overlaps_launches)
    )
    return Case(
        kernel,
        GemmWorkload(1, case.workload.n, case.workload.k),
        variant=variant,
        cache=case.cache,
        regime=case.regime,
        model=case.model,
        layer=case.layer,
    )


def _spec(label: str, backend: Backend) -> KernelSpec | None:
    try:
        return registry.resolve(label, backend).spec
    except UnsupportedError:  # a package is missing; the measurement reports which
        return None


def fitting(cases: Sequence[Case], backend: Backend) -> tuple[Case, ...]:
    """Leave out operations that a kernel doesn't compute, and stages that an external kernel lacks.

    Suites are made for our kernels, and their globs match kernels of any operation. A kernel that
    has none of the suite's stages keeps its cases; their results report this.
    """
    specs = {label: _spec(label, backend) for label in {case.label for case in cases}}
    # A kernel whose package is missing has no specification; its result reports that.
    computes = {label: spec.operation for label, spec in specs.items() if spec is not None}
    cases = [c for c in cases if computes.get(c.label, c.operation) == c.operation]

    def lacks_stage(case: Case) -> bool:
        spec = specs[case.label]
        if spec is None or not spec.is_external:
            return False
        return case.stage not in spec.stages

    runs = {case.label for case in cases if not lacks_stage(case)}
    return tuple(case for case in cases if case.label not in runs or not lacks_stage(case))


def _matches_globs(label: str, backend: Backend, capability: Capability | None) -> bool:
    spec = _spec(label, backend)
    # Globs don't select probes, which are added later.
    if spec is None or is_probe(spec.name):
        return False
    try:
        spec.check_capability(capability)
    except UnsupportedError:
        return False
    return True


def _check_exists(pattern: str, backend: Backend) -> None:
    labels = registry.labels(backend)
    if is_glob(pattern) or pattern in labels:
        return
    try:
        registry.resolve(pattern, backend)
    except UnsupportedError:
        near = listed(nearest_first(pattern, labels))
        raise UsageError(
            f"{pattern} has no {backend} implementation: this backend has {near}"
        ) from None
    except KernelError as error:
        raise UsageError(str(error)) from None


def _nothing_left(
    suite: Suite,
    backend: Backend,
    skipped: Sequence[str],
    offered: Sequence[str],
    requested: Sequence[str],
) -> str:
    if (
        not skipped
        and all(any(matches(pattern, label) for label in offered) for pattern in requested)
        and requested
    ):
        return (
            f"no case is left of suite {suite.name} for {', '.join(requested)}: it has none of "
            "these options together; drop one, or name shapes (--n and --k)"
        )
    names = ", ".join(skipped or (p for patterns in suite.kernel_filters for p in patterns))
    remedy = "--kernels-from FILE.py brings kernels of files; " if "." in names else ""
    return (
        f"nothing to measure: the {backend} backend has none of {names or 'the requested kernels'}"
        f": {remedy}it has {listed(registry.labels(backend))}"
    )

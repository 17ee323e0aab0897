"""Suite: kernels and shapes to measure, its restriction, and its cases.

A suite may name kernels that a backend does not have; `Suite.cases` skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TypeVar

from flexq_bench.workloads.case import CacheMode, Case, Regime, Stage, parse_kernel_label
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.expressions import Value
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.model_spec import ModelSpec
from flexq_bench.workloads.names import nearest_first
from flexq_bench.workloads.operation import (
    Operation,
    OperationWorkload,
    format_values,
    natural_order,
)
from flexq_bench.workloads.patterns import check_pattern, is_glob, matches, matches_any, select
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.ranges import PARAMETERS, in_sizes, parse_ranges

MAX_CASES = 100_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight matrix [N,K] with labels for display. model: empty: not a model's shape."""

    n: int
    k: int
    layer: str
    model: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Part of a suite: the Cartesian product of its fields. m: numbers of tokens.

    kernels: labels, or globs (see workloads.patterns).
    """

    kernels: tuple[str, ...]
    m: tuple[int, ...]
    shapes: tuple[Shape, ...]
    stages: tuple[Stage, ...] = ("gemm",)
    caches: tuple[CacheMode, ...] = ("cold",)
    regimes: tuple[Regime, ...] = ("boost",)

    @property
    def is_empty(self) -> bool:
        return not (self.kernels and self.m and self.shapes and self.stages and self.caches)


@dataclass(frozen=True, slots=True)
class OperationGroup:
    """Part of a suite: kernels on one operation at several parameters.

    kernels: as of Group. model, layer: labels for display.
    """

    kernels: tuple[str, ...]
    workloads: tuple[OperationWorkload, ...]
    caches: tuple[CacheMode, ...] = ("cold",)
    regimes: tuple[Regime, ...] = ("boost",)
    model: str = ""
    layer: str = ""

    @property
    def is_empty(self) -> bool:
        return not (self.kernels and self.workloads and self.caches)


@dataclass(frozen=True, slots=True)
class Suite:
    """A named set of cases. kernel_filters: restrictions of kernels; a label must match all."""

    name: str
    description: str
    source: str
    groups: tuple[Group | OperationGroup, ...]
    kernel_filters: tuple[tuple[str, ...], ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Labels and globs of all groups, before the kernel filters."""
        return _union(g.kernels for g in self.groups)

    @property
    def linear(self) -> tuple[Group, ...]:
        """Groups of linear layers."""
        return tuple(g for g in self.groups if isinstance(g, Group))

    @property
    def others(self) -> tuple[OperationGroup, ...]:
        """Groups of other operations."""
        return tuple(g for g in self.groups if isinstance(g, OperationGroup))

    @property
    def operations(self) -> tuple[str, ...]:
        linear = ("linear",) if self.linear else ()
        return (*linear, *_union([w.operation for w in g.workloads] for g in self.others))

    @property
    def models(self) -> tuple[str, ...]:
        named = [g.model for g in self.others if g.model]
        return _union([*([s.model for s in g.shapes if s.model] for g in self.linear), named])

    @property
    def layers(self) -> tuple[str, ...]:
        named = [g.layer for g in self.others if g.layer]
        return _union([*([s.layer for s in g.shapes] for g in self.linear), named])

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return _union(g.shapes for g in self.linear)

    @property
    def m(self) -> tuple[int, ...]:
        return tuple(sorted(_union(g.m for g in self.linear)))

    @property
    def stages(self) -> tuple[Stage, ...]:
        other: tuple[Stage, ...] = ("op",) if self.others else ()
        return _union([*(g.stages for g in self.linear), other])

    @property
    def caches(self) -> tuple[CacheMode, ...]:
        return _union(g.caches for g in self.groups)

    def restrict(
        self,
        *,
        models: Sequence[str] | None = None,
        layers: Sequence[str] | None = None,
        m: Sequence[int] | None = None,
        kernels: Sequence[str] | None = None,
        stages: Sequence[str] | None = None,
        caches: Sequence[str] | None = None,
        operations: Sequence[str] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> Suite:
        """Return the part of the suite with these values; None: all. kernels may be globs.

        m: of linear layers; other operations are left out. parameters: sizes (workloads.ranges) or
        words by name; operations without these parameters are left out.

        Raises WorkloadError if a value is not in the suite (the nearest names first), or if the
        result is empty.
        """
        models = None if models is None else tuple(name.lower() for name in models)
        self._check_known("model", models, tuple(name.lower() for name in self.models))
        self._check_known("layer", layers, self.layers)
        self._check_known("stage", stages, self.stages)
        self._check_known("cache", caches, self.caches)
        self._check_known("operation", operations, self.operations)
        for value in m or ():
            if value not in self.m:
                has = ", ".join(map(str, self.m))
                raise WorkloadError(
                    f"suite {self.name} has no M={value}: it has {has} "
                    "(`flexq-bench sweep` takes any)"
                )
        for pattern in kernels or ():
            self._check_kernel(pattern)

        def restricted(group: Group | OperationGroup) -> Group | OperationGroup:
            if isinstance(group, OperationGroup):
                return _restricted(group)
            if operations is not None and "linear" not in operations:
                return replace(group, m=())
            limits = dict(parameters or {})
            if limits.keys() - set("mnk"):
                return replace(group, m=())
            shapes = _filtered(group.shapes, lambda s: models is None or s.model.lower() in models)
            return replace(
                group,
                shapes=_filtered(
                    shapes,
                    lambda s: (
                        (layers is None or s.layer in layers)
                        and has_value(limits, "n", s.n)
                        and has_value(limits, "k", s.k)
                    ),
                ),
                m=_filtered(
                    group.m,
                    lambda value: (m is None or value in m) and has_value(limits, "m", value),
                ),
                stages=_filtered(group.stages, lambda stage: stages is None or stage in stages),
                caches=_filtered(group.caches, lambda mode: caches is None or mode in caches),
            )

        def _restricted(group: OperationGroup) -> OperationGroup:
            is_named = (models is None or group.model.lower() in models) and (
                layers is None or group.layer in layers
            )
            fits = is_named and m is None and (stages is None or "op" in stages)
            limits = parameters or {}
            return replace(
                group,
                workloads=_filtered(
                    group.workloads,
                    lambda w: (
                        fits
                        and (operations is None or w.operation in operations)
                        and limits.keys() <= dict(w.values).keys()
                        and all(has_value(limits, name, value) for name, value in w.values)
                    ),
                ),
                caches=_filtered(group.caches, lambda mode: caches is None or mode in caches),
            )

        groups = _filtered(map(restricted, self.groups), lambda group: not group.is_empty)
        if not groups:
            raise WorkloadError(
                f"nothing in suite {self.name} fits all of these restrictions: drop one of them"
            )
        filters = self.kernel_filters if kernels is None else (*self.kernel_filters, tuple(kernels))
        return replace(self, groups=groups, kernel_filters=filters)

    def adding(self, labels: Sequence[str]) -> Suite:
        """Return the suite with these kernels added, on all shapes except those of probes."""
        if not labels:
            return self
        groups = (
            group
            if all(map(is_probe, group.kernels))
            else replace(group, kernels=tuple(dict.fromkeys((*group.kernels, *labels))))
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def of(self, labels: Sequence[str]) -> Suite:
        """Return the suite with its kernels replaced by these."""
        return replace(
            self, groups=tuple(replace(group, kernels=tuple(labels)) for group in self.groups)
        )

    def under(self, regimes: tuple[Regime, ...]) -> Suite:
        """Return the suite with its regimes replaced by these."""
        return replace(self, groups=tuple(replace(g, regimes=regimes) for g in self.groups))

    def cases(self, kernel_labels: Sequence[str]) -> tuple[Case, ...]:
        """Return the distinct cases for the kernels of a backend, grouped by shape.

        Linear layers come first. kernel_labels: of the registry; their order is kept. Two models
        with the same layer shape share one case, with the labels of the first. Raises WorkloadError
        for more than 100,000.
        """
        size = self.count(kernel_labels)
        if size > MAX_CASES:
            raise WorkloadError(
                f"suite {self.name} makes {size:,} cases, at most {MAX_CASES:,} are taken: "
                "restrict models, M or kernels"
            )
        cases: dict[Case, None] = {}
        for group in self.groups:
            cases.update(dict.fromkeys(_combine(group, self._selected(group, kernel_labels))))
        rank = {label: position for position, label in enumerate(kernel_labels)}

        def order(case: Case) -> tuple[object, ...]:
            g = case.workload
            sizes = (g.n, g.k, g.m) if isinstance(g, GemmWorkload) else ()
            place = (case.operation != "linear", case.operation, sizes)
            values = "" if sizes else format_values(g.values, " ")
            last = (rank[case.label], case.stage, case.cache, case.regime)
            return (*place, natural_order(values), *last)

        return tuple(sorted(cases, key=order))

    def count(self, kernel_labels: Sequence[str]) -> int:
        """Count the cases for these kernels without generating them.

        Cases that two groups share are counted twice.
        """
        return sum(
            (
                len({(shape.n, shape.k) for shape in group.shapes})
                * len(set(group.m))
                * len(group.stages)
                if isinstance(group, Group)
                else len(set(group.workloads))
            )
            * len(group.caches)
            * len(group.regimes)
            * len(self._selected(group, kernel_labels))
            for group in self.groups
        )

    def unmatched(self, kernel_labels: Sequence[str]) -> tuple[str, ...]:
        """Return labels named by the suite or a restriction that a backend does not have.

        Globs are not included: they match what exists.
        """
        named = [p for p in self.kernels if all(matches_any(f, p) for f in self.kernel_filters)]
        requested = [p for patterns in self.kernel_filters for p in patterns]
        return tuple(
            label
            for label in dict.fromkeys((*named, *requested))
            if label not in kernel_labels and not is_glob(label)
        )

    def _selected(
        self, group: Group | OperationGroup, kernel_labels: Sequence[str]
    ) -> tuple[str, ...]:
        labels = select(group.kernels, kernel_labels)
        for patterns in self.kernel_filters:
            labels = select(patterns, labels)
        return labels

    def _check_known(self, kind: str, names: Sequence[str] | None, known: Sequence[str]) -> None:
        for name in names or ():
            if name not in known:
                has = ", ".join(nearest_first(name, known)) or "none, only shapes of its own"
                raise WorkloadError(f"suite {self.name} has no {kind} {name!r}: it has {has}")

    def _check_kernel(self, pattern: str) -> None:
        check_pattern(pattern)
        for known in self.kernels:
            both_globs = is_glob(pattern) and is_glob(known)
            if both_globs or matches(pattern, known) or matches(known, pattern):
                return
        self._check_known("kernel", [pattern], self.kernels)


def layer_shapes(models: Sequence[ModelSpec], layers: str | Sequence[str]) -> tuple[Shape, ...]:
    """Return the shapes of models' layers. layers: "fused", "separate", or names.

    Each model contributes the named layers it has: LLaMA's `down_proj` is OPT's `fc2`. Raises
    WorkloadError if no model has a layer of some name.
    """
    if layers in ("fused", "separate"):
        return tuple(
            Shape(s.n, s.k, s.name, model.name)
            for model in models
            for s in model.linear_layers(fused=layers == "fused")
        )
    names = (layers,) if isinstance(layers, str) else tuple(layers)
    known = {s.name: s for model in models for s in model.all_layers()}
    for name in names:
        if name not in known:
            near = ", ".join(nearest_first(name, known))
            raise WorkloadError(
                f"none of {', '.join(m.name for m in models)} has a layer {name!r}: there are "
                f"{near}; or all of them, fused or separate"
            )
    return tuple(
        Shape(s.n, s.k, s.name, model.name)
        for model in models
        for s in model.all_layers()
        if s.name in names
    )


def parameter_values(text: str) -> tuple[Value, ...]:
    """Parse the values of a parameter: sizes as `8,64` or `1:64:x2`, or words as `paged,masked`.

    Raises WorkloadError for invalid sizes, or if there are no values.
    """
    if text[:1].isdigit():
        return parse_ranges(text, PARAMETERS)
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise WorkloadError(f"{text!r:.60} names no value: write sizes or words")
    return words


def combinations(
    definition: Operation, values: Mapping[str, Sequence[Value]]
) -> tuple[OperationWorkload, ...]:
    """Return an operation at all combinations of parameters.

    Raises WorkloadError for more than 100,000, and for parameters that it can't have.
    """
    size = prod(map(len, values.values()))
    if size > MAX_CASES:
        raise WorkloadError(f"{size:,} combinations of parameters, at most {MAX_CASES:,} are taken")
    named = (dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))
    return tuple(dict.fromkeys(definition.workload(**chosen) for chosen in named))


def has_value(limits: Mapping[str, str], name: str, value: Value) -> bool:
    """Return True unless a limit of this name excludes the value: sizes (`8:64`), or words."""
    text = limits.get(name)
    if text is None:
        return True
    return in_sizes(value, text) if isinstance(value, int) else value in text.split(",")


def _combine(group: Group | OperationGroup, labels: Sequence[str]) -> Iterator[Case]:
    if isinstance(group, OperationGroup):
        for workload, label in product(group.workloads, labels):
            kernel, variant = parse_kernel_label(label)
            for cache, regime in product(group.caches, group.regimes):
                names = {"model": group.model, "layer": group.layer}
                yield Case(kernel, workload, variant, "op", cache, regime, **names)
        return
    for shape, m, label in product(group.shapes, group.m, labels):
        kernel, variant = parse_kernel_label(label)
        for stage, cache, regime in product(group.stages, group.caches, group.regimes):
            yield Case(
                kernel,
                GemmWorkload(m, shape.n, shape.k),
                variant=variant,
                stage=stage,
                cache=cache,
                regime=regime,
                model=shape.model,
                layer=shape.layer,
            )


def _filtered(items: Iterable[T], keep: Callable[[T], bool]) -> tuple[T, ...]:
    return tuple(item for item in items if keep(item))


def _union(parts: Iterable[Iterable[T]]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))

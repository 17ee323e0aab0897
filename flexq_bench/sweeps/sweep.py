"""Sweeps: kernels on shapes or workloads that the user chose; checked, converted to plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from flexq_bench.errors import UsageError
from flexq_bench.workloads.case import LINEAR_STAGES, CacheMode, Regime, Stage
from flexq_bench.workloads.models import get_model
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.operation import MAX_DIMENSION, OperationWorkload, operation
from flexq_bench.workloads.patterns import check_pattern
from flexq_bench.workloads.suite import Group, OperationGroup, Shape, Suite

STAGES = LINEAR_STAGES
CACHES: tuple[CacheMode, ...] = get_args(CacheMode)
REGIMES: tuple[Regime, ...] = get_args(Regime)
_FIELDS = ("kernels", "m", "shapes", "stages", "caches", "workloads")
_SHAPE_FIELDS = ("n", "k", "layer", "model")
_LAYER = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_MAX_VALUES, _MAX_KEY_CHARS = 1000, 400  # per list and workload in untrusted data

Word = TypeVar("Word", Stage, CacheMode, Regime)


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every kernel on every M of every shape, in every stage and cache mode, and on workloads.

    kernels: labels or globs. m: tokens. workloads: of other operations than linear layers.
    """

    kernels: tuple[str, ...]
    m: tuple[int, ...]
    shapes: tuple[Shape, ...]
    stages: tuple[Stage, ...] = ("gemm",)
    caches: tuple[CacheMode, ...] = ("cold",)
    workloads: tuple[OperationWorkload, ...] = ()

    def suite(self) -> Suite:
        groups = (
            Group(self.kernels, self.m, self.shapes, self.stages, self.caches),
            OperationGroup(self.kernels, self.workloads, self.caches),
        )
        chosen = tuple(group for group in groups if not group.is_empty)
        return Suite("sweep", "shapes that a person chose", "", chosen)

    def as_data(self) -> dict[str, Any]:
        """Convert to plain data, which `sweep_of` parses."""
        data: dict[str, Any] = {
            "kernels": list(self.kernels),
            "m": list(self.m),
            "shapes": [
                {"n": s.n, "k": s.k, "layer": s.layer, "model": s.model} for s in self.shapes
            ],
            "stages": list(self.stages),
            "caches": list(self.caches),
        }
        if self.workloads:
            data["workloads"] = [workload.key for workload in self.workloads]
        return data


def sweep_of(data: Mapping[str, Any]) -> Sweep:
    """Parse a sweep from untrusted plain data.

    Raises UsageError or WorkloadError for values that are missing, unknown, of a wrong type or out
    of bounds.
    """
    check_fields(data, _FIELDS, "a sweep")
    kernels = tuple(_text(kernel, "kernels") for kernel in _list(data, "kernels"))
    for kernel in kernels:
        check_pattern(kernel)
    workloads = _list(data, "workloads") if "workloads" in data else []
    least = 0 if workloads else 1
    return Sweep(
        kernels,
        tuple(sorted({_size(value, "m") for value in _list(data, "m", least)})),
        tuple(dict.fromkeys(_shape(value) for value in _list(data, "shapes", least))),
        select_words("stage", _list(data, "stages", least), STAGES),
        select_words("cache", _list(data, "caches"), CACHES),
        tuple(dict.fromkeys(_workload(value) for value in workloads)),
    )


def select_words(kind: str, requested: Sequence[Any], known: tuple[Word, ...]) -> tuple[Word, ...]:
    """Select the requested words, in the order of `known`. Raises UsageError for an unknown one."""
    for word in requested:
        if word not in known:
            raise UsageError(unknown(kind, str(word), known))
    return tuple(word for word in known if word in requested)


def check_cases(count: int, most: int, of: str) -> None:
    """Raise UsageError if count is above most. of: names the object with cases in the message."""
    if count > most:
        raise UsageError(
            f"this makes {count:,} cases, and {of} may have {most:,}: leave some sizes or kernels "
            "out"
        )


def check_fields(data: Mapping[str, Any], fields: Sequence[str], of: str) -> None:
    """Raise UsageError if data has a field that is not one of these."""
    for name in data:
        if name not in fields:
            raise UsageError(unknown(f"field of {of}", str(name), fields))


def _list(data: Mapping[str, Any], name: str, least: int = 1) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list) or not least <= len(value) <= _MAX_VALUES:
        raise UsageError(f"{name} must be a list of {least} to {_MAX_VALUES} values")
    return value


def _workload(value: Any) -> OperationWorkload:
    workload = OperationWorkload.from_key(_text(value, "workloads")[:_MAX_KEY_CHARS])
    return operation(workload.operation).workload(**dict(workload.values))


def _shape(value: Any) -> Shape:
    if not isinstance(value, Mapping):
        raise UsageError(f"a shape must be an object with n and k, got {value!r:.60}")
    check_fields(value, _SHAPE_FIELDS, "a shape")
    layer, model = (_text(value.get(name, ""), name) for name in ("layer", "model"))
    if _LAYER.fullmatch(layer) is None:
        raise UsageError(
            f"layer is {layer!r:.60}: a layer's name has letters, digits and ._- only, 64 at most"
        )
    if model:
        get_model(model)
    return Shape(_size(value.get("n"), "n"), _size(value.get("k"), "k"), layer, model)


def _size(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DIMENSION:
        raise UsageError(
            f"{name} must be a whole number from 1 to {MAX_DIMENSION}, got {value!r:.60}"
        )
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text, got {value!r:.60}")
    return value

"""Description of an external kernel, for processes that must not run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from flexq_bench.kernels.contract import KernelSpec, LinearKernel
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.workloads.operation import declare_plain, declared_as_plain

_FORMATS = ("weight", "activation", "cache")
_TUPLES = ("stages", "min_capability", "max_capability")


class DescribedKernel(LinearKernel):
    """Known by its spec to plans, gates and series; runs only in worker processes."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise UnsupportedError(
            f"{self.spec.label} is an external kernel, which runs in a worker process only"
        )

    pack_weight = pack_activation = empty_activation = activate = gemm = _refuse


def spec_as_plain(spec: KernelSpec) -> dict[str, Any]:
    """Return a spec as JSON values; `spec_of_plain` is the inverse."""
    definition = declared_as_plain(spec.operation)
    return {**asdict(spec), "package": None, "definition": definition}


def spec_of_plain(values: Mapping[str, Any]) -> KernelSpec:
    """Return the spec of another process's plain values, and declare its operation.

    Raises TypeError, ShapeError, and WorkloadError if there is another operation of that name.
    """
    values = dict(values)
    if (definition := values.pop("definition", None)) is not None:
        declare_plain(definition)
    formats = {name: NumberFormat(**values[name]) for name in _FORMATS}
    tuples = {name: tuple(values[name]) for name in _TUPLES}
    return KernelSpec(**{**values, **formats, **tuples})

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
_OWN_RULE = "has_own_rule"
_TUPLES = ("stages", "min_capability", "max_capability")


class DescribedKernel(LinearKernel):
    """Known by its spec to plans, gates and series; runs only in worker processes.

    has_own_rule: it quantizes operands in a way of its own, in its process.
    """

    def __init__(self, spec: KernelSpec, *, has_own_rule: bool = False) -> None:
        self.spec, self.has_own_rule = spec, has_own_rule

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise UnsupportedError(
            f"{self.spec.label} is an external kernel, which runs in a worker process only"
        )

    pack_weight = pack_activation = empty_activation = activate = gemm = _refuse


def as_plain(spec: KernelSpec, *, has_own_rule: bool) -> dict[str, Any]:
    """Return a description as JSON values; `described_by` is the inverse."""
    definition = declared_as_plain(spec.operation)
    return {**asdict(spec), "package": None, "definition": definition, _OWN_RULE: has_own_rule}


def described_by(values: Mapping[str, Any]) -> DescribedKernel:
    """Return a kernel of another process's plain values, and declare its operation.

    Raises TypeError, ShapeError, and WorkloadError if there is another operation of that name.
    """
    values = dict(values)
    has_own_rule = bool(values.pop(_OWN_RULE, False))
    if (definition := values.pop("definition", None)) is not None:
        declare_plain(definition)
    formats = {name: NumberFormat(**values[name]) for name in _FORMATS}
    tuples = {name: tuple(values[name]) for name in _TUPLES}
    updates = tuple((str(output), str(of)) for output, of in values.get("updates", ()))
    spec = KernelSpec(**{**values, **formats, **tuples, "updates": updates})
    return DescribedKernel(spec, has_own_rule=has_own_rule)

"""Description of an external kernel, for processes that must not run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, LinearKernel, PackedOperand
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.formats import NumberFormat, Operand

_FORMATS = ("weight", "activation")
_TUPLES = ("stages", "min_capability", "max_capability")


class DescribedKernel(LinearKernel):
    """Known by its spec to plans, gates and series; runs only in worker processes."""

    def __init__(self, spec: KernelSpec) -> None:
        self.spec = spec

    def pack_weight(self, weight: Operand) -> PackedOperand:
        self._refuse()

    def pack_activation(self, x: Operand) -> PackedOperand:
        self._refuse()

    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        self._refuse()

    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        self._refuse()

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(
            f"{self.spec.label} is an external kernel, which runs in a worker process only"
        )


def spec_as_plain(spec: KernelSpec) -> dict[str, Any]:
    """Return a spec as JSON values; `spec_of_plain` is the inverse."""
    return {**asdict(spec), "package": None}


def spec_of_plain(values: Mapping[str, Any]) -> KernelSpec:
    """Return the spec of another process's plain values. Raises TypeError and ShapeError."""
    formats = {name: NumberFormat(**values[name]) for name in _FORMATS}
    tuples = {name: tuple(values[name]) for name in _TUPLES}
    return KernelSpec(**{**values, **formats, **tuples})

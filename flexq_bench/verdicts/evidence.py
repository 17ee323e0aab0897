"""The exact inputs of a verdict, as values that survive a database bit for bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flexq_bench.verdicts.confirmation import Comparison

_BLOCKS = ("base_us", "head_us", "base_mhz", "head_mhz")  # one number per block, or unknown


@dataclass(frozen=True, slots=True)
class Evidence:
    """All inputs of a verdict.

    beside: p-values of the other comparisons judged in the same night. floor, baseline: ln changes
    of the read floor and of the frozen baseline kernel between the same commits, 0: no significant
    change; None: not compared. The other fields are shown to people and do not affect the verdict.
    """

    case: str  # Case.key
    comparison: Comparison
    beside: tuple[float, ...] = ()
    floor: float | None = None
    baseline: float | None = None
    detail: str = ""
    base_binary: str | None = None
    head_binary: str | None = None
    base_config: Mapping[str, Any] | None = None
    head_config: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON values without NaN or infinities; `from_dict` restores the evidence."""
        flat = {item.name: getattr(self, item.name) for item in fields(self)}
        comparison = {f.name: getattr(self.comparison, f.name) for f in fields(Comparison)}
        comparison |= {name: _encoded(comparison[name]) for name in _BLOCKS}
        comparison["placement"] = np.asarray(self.comparison.placement).tolist()
        return flat | {"comparison": comparison, "beside": list(self.beside)}

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> Evidence:
        """Inverse of `as_dict`; fields that other versions have, or lack, make no difference.

        Raises TypeError, KeyError or ValueError for other input.
        """
        comparison = _known(Comparison, flat["comparison"])
        comparison |= {name: _decoded(comparison[name]) for name in _BLOCKS if name in comparison}
        comparison["placement"] = tuple(comparison["placement"])
        values = {
            **_known(cls, flat),
            "comparison": Comparison(**comparison),
            "beside": tuple(flat.get("beside", ())),
        }
        return cls(**values)


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {item.name: values[item.name] for item in fields(kind) if item.name in values}


def _encoded(values: ArrayLike | None) -> list[float | str | None] | None:
    """NaN as null and infinities as text, because JSON has neither."""
    if values is None:
        return None
    numbers = np.asarray(values, dtype=np.float64).tolist()
    return [v if math.isfinite(v) else None if math.isnan(v) else str(v) for v in numbers]


def _decoded(values: list[float | str | None] | None) -> tuple[float, ...] | None:
    if values is None:
        return None
    return tuple(math.nan if value is None else float(value) for value in values)

"""Texts of stored changes, for lists and messages: imports no statistics."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flexq_bench.db.units import unit_and_scale

if TYPE_CHECKING:
    from flexq_bench.db.queries import AlertRow, DecisionRow


def levels_text(before: float, after: float, unit: str) -> str:
    """Return `0 -> 5 spills`."""
    return f"{before:.6g} -> {after:.6g} {unit_and_scale(unit)[0]}".rstrip()


def decision_text(decision: DecisionRow) -> str | None:
    """Return the change of a stored verdict as `+5.13 %`, or `0 -> 5 spills`; None: it has none."""
    if decision.log_ratio is not None:
        return f"{100 * math.expm1(decision.log_ratio):+.2f} %"
    numbers = decision.numbers or {}
    if "before" not in numbers or "after" not in numbers:
        return None
    return levels_text(numbers["before"], numbers["after"], decision.unit)


def alert_text(alert: AlertRow) -> str | None:
    """Return the worst change of an alert like `decision_text`; None: its results are wrong."""
    if alert.worst is not None:
        return f"{100 * math.expm1(alert.worst):+.2f} %"
    return None if alert.levels is None else levels_text(*alert.levels)

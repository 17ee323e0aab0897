"""Served engines as rows: what a gate measured of each, next to its base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from flexq_bench.dashboard.shared.gates import deciding_limit, marked
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.db.queries import GateRow
from flexq_bench.db.records import GateLimit

_ACCURACY, _SPEED = "accuracy of ", "speed "  # beginnings of the checks of `gate served`


def accuracy_checks(gates: Iterable[GateRow]) -> list[str]:
    """Suites whose accuracy was judged, as their checks are named."""
    return _checks(gates, _ACCURACY)


def speed_checks(gates: Iterable[GateRow]) -> list[str]:
    """Metrics of speed with an interval, as their checks are named."""
    return _checks(gates, _SPEED)


def _checks(gates: Iterable[GateRow], beginning: str) -> list[str]:
    limits = [limit for gate in gates for limit in gate.limits]
    names = [
        limit.check
        for limit in limits
        if limit.check.startswith(beginning) and limit.low is not None
    ]
    return list(dict.fromkeys(names))


def engines_frame(gates: Sequence[GateRow], accuracy: str, speed: str) -> pd.DataFrame:
    """Return the newest gate of each engine and model against one base, and the base itself.

    gates: newest first. accuracy, speed: checks; empty: none was judged. Columns: engine, model,
    verdict, outcome of the gate; of both checks the value, and its change against the base with
    the interval (change, low, high), accuracy in points and speed in percent.
    """
    newest: dict[tuple[str, str], GateRow] = {}
    for gate in gates:
        newest.setdefault((gate.scheme, gate.model), gate)
    rows = [_row(gate, accuracy, speed) for gate in newest.values()]
    return pd.DataFrame(rows)


def with_intervals_of_values(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with intervals of accuracy and speed themselves in place of their changes.

    They are around the value of the base that was measured with them.
    """
    ends = {}
    for end in ("low", "high"):
        ends[f"accuracy {end}"] = frame["accuracy of base"] + frame[f"accuracy {end}"]
        ends[f"speed {end}"] = frame["speed of base"] * (1 + frame[f"speed {end}"] / 100)
    return frame.assign(**ends)


def _row(gate: GateRow, accuracy: str, speed: str) -> dict[str, object]:
    limits = {limit.check: limit for limit in gate.limits}
    score, time = limits.get(accuracy), limits.get(speed)
    return {
        "engine": gate.scheme,
        "model": gate.model,
        "outcome": gate.verdict,
        "verdict": marked(gate.verdict),
        "decided by": deciding_limit(gate),
        **_values("accuracy", score),
        **_values("speed", time),
        "limits": page_address("engines", base=gate.base, gate=gate.uuid[:8]),
        "GPU": gate.gpu,
    }


def _values(name: str, limit: GateLimit | None) -> dict[str, object]:
    return {
        f"{name} of base": limit and limit.base,
        name: limit and limit.value,
        f"{name} change": limit and limit.change,
        f"{name} low": limit and limit.low,
        f"{name} high": limit and limit.high,
    }

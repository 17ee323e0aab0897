"""Decisions of accuracy gates as rows of tables, and the list of which one shows its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

from flexq_bench.dashboard.shared.controls import Controls
from flexq_bench.dashboard.shared.formatting import local_time, short_commit
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.dashboard.shared.tables import draw_table
from flexq_bench.db.queries import GateRow
from flexq_bench.db.records import GATE_OUTCOMES, GateLimit

_MAX_DETAILS = 20  # lines of a gate
_MARKS = {"pass": "✓", "ambiguous": "?"} | dict.fromkeys(("fail", "regression"), "✗")
_MARKS |= dict.fromkeys(("not judged", "missing"), "–")


def gate_rows(
    gates: Sequence[GateRow], model: str, names: Mapping[str, str], zone: tzinfo
) -> list[dict[str, Any]]:
    """Return one row per gate, in the given order. names: sha -> release."""
    return [
        {
            "release or commit": names.get(gate.commit) or short_commit(gate.commit, gate.dirty),
            "scheme": gate.scheme,
            "verdict": marked(gate.verdict),
            "decided by": deciding_limit(gate),
            "through": gate.through,
            "checkpoint": (gate.content_hash or "")[:12],
            "against": gate.base if not gate.reference else f"{gate.base} {gate.reference}",
            "reference": (gate.reference_hash or "")[:12],
            "policy": f"{gate.policy}, version {gate.policy_version}, {gate.policy_hash[:8]}",
            "exit code": gate.exit_code,
            "limits": page_address("accuracy", model=model, gate=gate.uuid[:8]),
            "GPU": gate.gpu,
            "run": gate.run[:8],
            "when": local_time(gate.created_at, zone),
        }
        for gate in gates
    ]


def limit_rows(gate: GateRow) -> list[dict[str, Any]]:
    """Return one row per limit of the policy; negative limits are the allowed loss."""
    return [
        {
            "check": limit.check,
            "outcome": f"{marked(limit.outcome)}{' (allowed)' if limit.allowed else ''}",
            "why": limit.reason,
            "change": _change(limit),
            "limit": _limit(limit.limit),
            "coverage": limit.coverage,
            "detectable": ""
            if limit.detectable is None
            else f"{limit.detectable:.3g} {limit.unit}",
            gate.base: limit.base,
            gate.scheme: limit.value,
        }
        for limit in gate.limits
    ]


def cause_lines(gate: GateRow) -> list[str]:
    """Return the causes of failures, and the details of each limit."""
    causes = [limit.cause for limit in gate.limits if limit.cause]
    details = [f"{limit.check}: {line}" for limit in gate.limits for line in limit.details]
    return [*causes, *details[:_MAX_DETAILS]]


def layer_rows(gate: GateRow) -> list[dict[str, Any]]:
    """Return one row per diagnosed layer of a failed gate, largest effect first."""
    return [
        {
            "layer": layer["layer"],
            "output error": layer["error"],
            "KL with the original's layer (nats)": layer["kl_restored"],
        }
        for layer in (gate.diagnosis or {}).get("layers", ())
    ]


def token_rows(gate: GateRow) -> list[dict[str, Any]]:
    """Return one row per token with the largest loss."""
    return [
        {"after": t["before"], "token": t["token"], "lost (nats)": t["loss"], "KL": t["kl"]}
        for t in (gate.diagnosis or {}).get("tokens", ())
    ]


def show_limits(
    controls: Controls, gates: Sequence[GateRow], names: Mapping[str, str], zone: tzinfo
) -> GateRow:
    """Select a gate, show its limits, and return it. names: sha -> release."""
    chosen = controls.select_row(
        "gate", "Limits of", gates, lambda gate: _gate_name(gate, names, zone)
    )
    draw_table(limit_rows(chosen), key="limits")
    return chosen


def _gate_name(gate: GateRow, names: Mapping[str, str], zone: tzinfo) -> str:
    """Return the title of a gate in a list."""
    place = names.get(gate.commit) or short_commit(gate.commit, gate.dirty)
    return f"{gate.scheme} at {place} · {gate.verdict} · {local_time(gate.created_at, zone)}"


def marked(outcome: str) -> str:
    """Prefix an outcome with a symbol, so that it is recognizable without colour."""
    return f"{_MARKS[outcome]} {outcome}"


def deciding_limit(gate: GateRow) -> str:
    """Return the first limit with the worst outcome, which decides the verdict."""
    if not gate.limits:
        return ""
    worst = min(gate.limits, key=lambda limit: (limit.allowed, GATE_OUTCOMES.index(limit.outcome)))
    change = _change(worst) or worst.reason
    return f"{worst.check}: {change}" if change else worst.check


def _limit(words: str) -> str:
    if not words or words.startswith(("at least", "at most", "no loss", "can be", "±")):
        return words
    return f"{'≥' if words.startswith('-') else '≤'} {words}"


def _change(limit: GateLimit) -> str:
    """Return `+0.40 % (+0.27 to +0.53)`; without a change the value; empty: not evaluated."""
    if limit.change is not None:
        form = "{:+.2g}" if limit.unit == "nats" else "{:+.2f}"
        interval = (
            f" ({form.format(limit.low)} to {form.format(limit.high)})"
            if limit.low is not None and limit.high is not None
            else ""
        )
        return f"{form.format(limit.change)} {limit.unit}{interval}"
    return "" if limit.value is None else f"{limit.value:.4g} {limit.unit}".rstrip()

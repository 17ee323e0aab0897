"""Decisions of accuracy gates as rows of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import tzinfo
from typing import Any

from dashboard.shared.formatting import local_time, short_commit
from dashboard.shared.links import page_address
from db.gate_records import GATE_OUTCOMES, GateLimit
from db.queries import GateRow

_MARKS = {"pass": "✓", "regression": "✗", "ambiguous": "?", "missing": "–"}


def gate_rows(
    gates: Sequence[GateRow], model: str, names: Mapping[str, str], zone: tzinfo
) -> list[dict[str, Any]]:
    """A row a gate, in the order given. names: by sha what people call the commit, if anything."""
    return [
        {
            "release or commit": names.get(gate.commit) or short_commit(gate.commit, gate.dirty),
            "scheme": gate.scheme,
            "verdict": marked(gate.verdict),
            "decided by": _deciding(gate),
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
    """A row for each limit that the policy set; one with a minus is how much worse it may be."""
    return [
        {
            "check": one.check,
            "outcome": marked(one.outcome),
            "change": _change(one),
            "limit": _limit(one.limit),
            "could see": "" if one.detectable is None else f"{one.detectable:.3g} {one.unit}",
            gate.base: one.base,
            gate.scheme: one.value,
            "why": one.reason,
        }
        for one in gate.limits
    ]


def layer_rows(gate: GateRow) -> list[dict[str, Any]]:
    """A row for each layer of a gate that failed, those that matter most first."""
    return [
        {
            "layer": one["layer"],
            "output error": one["error"],
            "KL with the original's layer (nats)": one["kl_restored"],
        }
        for one in (gate.diagnosis or {}).get("layers", ())
    ]


def token_rows(gate: GateRow) -> list[dict[str, Any]]:
    """A row for each of the tokens that lost most."""
    return [
        {"after": one["before"], "token": one["token"], "lost (nats)": one["loss"], "KL": one["kl"]}
        for one in (gate.diagnosis or {}).get("tokens", ())
    ]


def gate_name(gate: GateRow, names: Mapping[str, str], zone: tzinfo) -> str:
    """Return the title of a gate in a list."""
    place = names.get(gate.commit) or short_commit(gate.commit, gate.dirty)
    return f"{gate.scheme} at {place} · {gate.verdict} · {local_time(gate.created_at, zone)}"


def marked(outcome: str) -> str:
    """The word with a sign before it that tells it from the others without its colour."""
    return f"{_MARKS[outcome]} {outcome}"


def _deciding(gate: GateRow) -> str:
    """The limit that the verdict comes from; of several that say the same the first."""
    if not gate.limits:
        return ""
    worst = min(gate.limits, key=lambda one: GATE_OUTCOMES.index(one.outcome))
    change = _change(worst) or worst.reason
    return f"{worst.check}: {change}" if change else worst.check


def _limit(words: str) -> str:
    if words.startswith(("at least", "at most", "no loss", "±")):
        return words
    return f"{'≥' if words.startswith('-') else '≤'} {words}"


def _change(one: GateLimit) -> str:
    """`+0.40 % (+0.27 to +0.53)`; of a check without a change its value; empty: not evaluated."""
    if one.change is not None:
        interval = (
            f" ({one.low:+.2f} to {one.high:+.2f})"
            if one.low is not None and one.high is not None
            else ""
        )
        return f"{one.change:+.2f} {one.unit}{interval}"
    return "" if one.value is None else f"{one.value:.4g} {one.unit}".rstrip()

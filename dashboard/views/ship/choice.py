"""Checkpoints of a model that may be shipped, in their order; reasons why others may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flexq_bench.accuracy.results import FULL_PRECISION
from flexq_bench.dashboard.shared.gates import deciding_limit
from flexq_bench.dashboard.views.pareto.frame import RANDOM_WEIGHTS, Setting
from flexq_bench.db.queries import DecodeRow, GateRow

TIME, MEMORY = "token_ms", "memory_gib"
# What a checkpoint lacks; the page has a command for each.
NOT_EVALUATED, NOT_GATED, NOT_DECODED, MORE_TEXT = "evaluate", "gate", "decode", "more text"


def judged_checkpoints(
    frame: pd.DataFrame, gates: Sequence[GateRow], tolerated: float
) -> pd.DataFrame:
    """Return the rows of a pareto_frame with columns gate, reasons and gap.

    tolerated: largest perplexity increase, percent, which the whole interval must keep. A gate of a
    checkpoint's own bytes is preferred to one of its scheme. reasons: why it is excluded; empty: it
    may be shipped. gap: what it lacks, empty if it was judged and refused.
    """
    of_bytes = {gate.content_hash[:12]: gate for gate in reversed(gates) if gate.content_hash}
    of_scheme = {gate.scheme: gate for gate in reversed(gates) if not gate.content_hash}
    rows = []
    for row in frame.to_dict("records"):
        gate = of_bytes.get(row["checkpoint"]) or of_scheme.get(row["scheme"])
        reasons, gaps = [], []
        if pd.isna(row["increase"]):
            reasons.append("its loss is not known")
            gaps.append(NOT_EVALUATED)
        elif row["low"] > tolerated:
            reasons.append(f"loses {row['increase']:.2f} % ({row['low']:.2f} to {row['high']:.2f})")
        elif row["high"] > tolerated:
            reasons.append(f"may lose up to {row['high']:.2f} %")
            gaps.append(MORE_TEXT)
        if gate is None:
            reasons.append("no gate judged it")
            gaps.append(NOT_GATED)
        elif gate.verdict != "pass":
            reasons.append(f"its gate says {gate.verdict}: {deciding_limit(gate)}")
        if pd.isna(row["token_ms"]):
            reasons.append("not decoded here")
            gaps.append(NOT_DECODED)
        elif row["speed_of"] == RANDOM_WEIGHTS:
            reasons.append("only random weights were decoded")
            gaps.append(NOT_DECODED)
        verdict = "" if gate is None else gate.verdict
        is_refused = len(reasons) > len(gaps)
        rows.append(
            row
            | {
                "gate": verdict if gate is None or gate.content_hash else f"{verdict} (scheme)",
                "reasons": "; ".join(reasons),
                "gap": "" if is_refused else next(iter(gaps), ""),
            }
        )
    return pd.DataFrame(rows, columns=[*frame.columns, "gate", "reasons", "gap"])


def ranked(judged: pd.DataFrame, by: str) -> pd.DataFrame:
    """Return the checkpoints without a reason against them, best first, with a column rank."""
    chosen = judged[judged["reasons"] == ""].dropna(subset=[by]).sort_values([by, "increase"])
    return chosen.assign(rank=range(1, len(chosen) + 1))


def full_precision(decodes: Sequence[DecodeRow], setting: Setting | None) -> Mapping[str, Any]:
    """Return time, interval and memory (GiB) of the unquantized model; empty: not decoded here."""
    here = [row for row in decodes if setting is not None and Setting.of(row) == setting]
    for row in reversed(here):
        if row.scheme == FULL_PRECISION and row.token_ms is not None:
            memory = row.peak_memory_bytes or row.weights_bytes
            return {
                "token_ms": row.token_ms,
                "token_low": row.token_ci_low_ms,
                "token_high": row.token_ci_high_ms,
                "memory_gib": None if memory is None else memory / 2**30,
            }
    return {}


def indistinct(chosen: pd.DataFrame) -> list[str]:
    """Return the schemes whose time's interval overlaps that of the first."""
    if chosen.empty:
        return []
    first = chosen.iloc[0]
    others = chosen.iloc[1:]
    overlapping = others[others["token_low"] <= first["token_high"]]
    return [str(scheme) for scheme in overlapping["scheme"]]

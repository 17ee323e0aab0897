"""Chart and description of the evidence of one verdict of an alert."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import streamlit as st
from numpy.typing import ArrayLike

from flexq_bench.dashboard.shared.charts import draw_chart
from flexq_bench.dashboard.shared.colors import kernel_styles
from flexq_bench.dashboard.shared.formatting import as_code, as_text
from flexq_bench.dashboard.views.alert.charts import block_changes
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import DecisionRow
from flexq_bench.verdicts import Evidence
from flexq_bench.verdicts.confirmation import judged_blocks
from flexq_bench.verdicts.recompute import Explained, explain_decision
from flexq_bench.workloads.case import kernel_label


def show_evidence(session: Session, member: DecisionRow, kernels: Sequence[str]) -> None:
    """Show a verdict as it was decided, its evidence, and what today's rules say of it.

    kernels: all kernels of the database, for the colours.
    """
    explained = explain_decision(session, member)
    if explained.problem:
        warning = as_text(f"Don't trust this verdict: {explained.problem}.")
        st.error(warning, icon=":material/error:")
    st.markdown(f"{as_text(member.reason)}; cause: {as_text(member.cause)}")
    evidence = explained.evidence
    if evidence is not None:
        blocks = judged_blocks(evidence.comparison)
        if blocks.ratios.size:
            label = kernel_label(member.kernel, member.variant)
            style = kernel_styles(kernels, [(member.kernel, member.variant)])[label]
            figure = block_changes(evidence.comparison, explained.conclusion, style)
            draw_chart(figure, key="evidence")
        else:
            st.info("There is nothing to draw: no block of the two commits may be compared.")
        st.markdown("  \n".join(_facts(evidence, blocks.left_out)))
    st.caption(as_text(_in_words(explained)))


def _in_words(explained: Explained) -> str:
    """Name the rule that decided, and today's answer."""
    row, again = explained.decision, explained.again
    rule = f": {row.rule}" if row.rule else ""
    decided = f"Decided by {row.detector} {row.detector_version}{rule}."
    if again is None:
        return f"{decided} This version has no rules to recompute it."
    if not again.differences:
        return f"{decided} Recomputed by {again.rules}: the same to the last bit."
    return f"{decided} Recomputed by {again.rules}: {again.verdict or 'nothing'}, {again.reason}."


def _facts(evidence: Evidence, left_out: int) -> list[str]:
    """Return Markdown lines with possible causes of a difference other than the code."""
    comparison = evidence.comparison
    lines = [f"Machine code: **{_machine_code(evidence)}**"]
    clocks = (_clocks(comparison.base_mhz), _clocks(comparison.head_mhz))
    lines.append(f"SM clock: base {clocks[0]}, head {clocks[1]}")
    if left_out:
        lines.append(f"Left out, since the clocks of the two disagree: {left_out} blocks")
    if evidence.base_config or evidence.head_config:
        base, head = (str(dict(c or {})) for c in (evidence.base_config, evidence.head_config))
        same = f"{as_code(base)} on both sides"
        lines.append(
            "Configuration: "
            + (same if base == head else f"base {as_code(base)}, head {as_code(head)}")
        )
    return lines


def _machine_code(evidence: Evidence) -> str:
    if evidence.comparison.same_binary:
        return "the same, so it is not the code"
    if evidence.base_binary is None or evidence.head_binary is None:
        return "not known"
    return "differs"


def _clocks(values: ArrayLike | None) -> str:
    clocks = [] if values is None else np.asarray(values, dtype=np.float64).tolist()
    known = [value for value in clocks if math.isfinite(value)]
    if not known:
        return "not known"
    low, high = f"{min(known):.0f}", f"{max(known):.0f}"
    return f"{low} MHz" if low == high else f"{low} to {high} MHz"

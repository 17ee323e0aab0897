"""From measured times to verdicts and alerts: triggers, confirmation, patterns, noise, evidence.

The names exported here compute on plain values, and are imported on first use. Storing verdicts and
opening alerts (`verdicts.nightly`) and recomputing stored ones (`verdicts.recompute`) need the
database. They are imported by module name, so that a worker process that only measures does not
load SQLAlchemy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexq_bench.packages import exported_on_use

if TYPE_CHECKING:
    from flexq_bench.verdicts.alert_rule import attribute
    from flexq_bench.verdicts.case_comparison import CaseComparison, Comparer
    from flexq_bench.verdicts.confirmation import (
        Comparison,
        Confirmation,
        confirm,
        confirm_together,
    )
    from flexq_bench.verdicts.detector import Judged, judge_evidence, judge_together
    from flexq_bench.verdicts.evidence import Evidence
    from flexq_bench.verdicts.history_trigger import Trigger, creep, trigger
    from flexq_bench.verdicts.noise import NoiseLevels, noise_levels
    from flexq_bench.verdicts.patterns import Classification, Nights, Pattern, classify
    from flexq_bench.verdicts.verdict import Cause, Verdict

__all__ = [
    "CaseComparison",
    "Cause",
    "Classification",
    "Comparer",
    "Comparison",
    "Confirmation",
    "Evidence",
    "Judged",
    "Nights",
    "NoiseLevels",
    "Pattern",
    "Trigger",
    "Verdict",
    "attribute",
    "classify",
    "confirm",
    "confirm_together",
    "creep",
    "judge_evidence",
    "judge_together",
    "noise_levels",
    "trigger",
]

_MODULES = {
    "attribute": "alert_rule",
    **dict.fromkeys(("CaseComparison", "Comparer"), "case_comparison"),
    **dict.fromkeys(("Comparison", "Confirmation", "confirm", "confirm_together"), "confirmation"),
    **dict.fromkeys(("Judged", "judge_evidence", "judge_together"), "detector"),
    "Evidence": "evidence",
    **dict.fromkeys(("Trigger", "creep", "trigger"), "history_trigger"),
    **dict.fromkeys(("NoiseLevels", "noise_levels"), "noise"),
    **dict.fromkeys(("Classification", "Nights", "Pattern", "classify"), "patterns"),
    **dict.fromkeys(("Cause", "Verdict"), "verdict"),
}

__getattr__ = exported_on_use(__name__, _MODULES)

"""From interleaved comparisons to stored verdicts, and to alerts that people can trust."""

from __future__ import annotations

from flexq_bench.verdicts.compared import Compared, Comparer, Machine
from flexq_bench.verdicts.detector import Judged, judge, judge_night
from flexq_bench.verdicts.evidence import Evidence
from flexq_bench.verdicts.explaining import Recomputed, recompute, recompute_decision
from flexq_bench.verdicts.night import Night, record_night

__all__ = [
    "Compared",
    "Comparer",
    "Evidence",
    "Judged",
    "Machine",
    "Night",
    "Recomputed",
    "judge",
    "judge_night",
    "recompute",
    "recompute_decision",
    "record_night",
]

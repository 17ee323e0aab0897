"""Results of other tools, read into records: one module a format, registered in `formats.py`.

They are judged by their history alone: nobody here can measure both commits beside each other.
"""

from __future__ import annotations

from flexq_bench.runs.outside.formats import FORMATS, read_results
from flexq_bench.runs.outside.records import Origin, outside_records
from flexq_bench.runs.outside.result import OutsideResult, Reading, Refused

__all__ = [
    "FORMATS",
    "Origin",
    "OutsideResult",
    "Reading",
    "Refused",
    "outside_records",
    "read_results",
]

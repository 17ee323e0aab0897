"""Import of results of other tools as records: one module per format, registered in `formats.py`.

These results are judged by history alone, because both commits can't be measured interleaved here.
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

"""Import of results of other tools as records: one module per format, registered in `formats.py`.

These results are judged by history alone, because both commits can't be measured interleaved here.
"""

from __future__ import annotations

from flexq_bench.exchange.external.formats import FORMATS, read_results
from flexq_bench.exchange.external.records import Origin, external_records
from flexq_bench.exchange.external.result import ExternalResult, Reading, Refused

__all__ = [
    "FORMATS",
    "ExternalResult",
    "Origin",
    "Reading",
    "Refused",
    "external_records",
    "read_results",
]

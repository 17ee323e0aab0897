"""Export of records in the formats of other services, one module per format (`formats.py`)."""

from __future__ import annotations

from flexq_bench.exchange.exports.formats import EXPORTS, Export, write_export

__all__ = ["EXPORTS", "Export", "write_export"]

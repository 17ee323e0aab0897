"""Reader of resources.csv, which benchmarks/kernels/resources.py writes."""

from __future__ import annotations

from pathlib import Path

from flexq_bench.kernels.resource_table import read_table
from flexq_bench.kernels.runtime.resource_row import ResourceRow


def stored_resources() -> list[ResourceRow]:
    return read_table(Path(__file__).parent / "resources.csv")

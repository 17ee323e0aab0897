"""Write tests/kernels/resources.csv: registers, spills and shared memory of every build.

Run it after a change of a kernel, review the difference, and commit both:
    python benchmarks/kernels/resources.py
"""

from __future__ import annotations

from pathlib import Path

from flexq_bench.kernels.resource_table import measure_table, write_table

TABLE = Path(__file__).parents[2] / "tests" / "kernels" / "resources.csv"

if __name__ == "__main__":
    write_table(TABLE, measure_table())

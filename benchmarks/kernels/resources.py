"""Write tests/kernels/resources.csv: registers, spills and shared memory of every build.

Run it after a change of a kernel, review the difference, and commit both:
    python benchmarks/kernels/resources.py [SOURCE ...]

SOURCE: in kernels/csrc, for example weight_only/gemm.cu: only its rows are measured again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flexq_bench.kernels.resource_table import measure_table, read_table, write_table

TABLE = Path(__file__).parents[2] / "tests" / "kernels" / "resources.csv"

if __name__ == "__main__":
    write_table(TABLE, measure_table(sources=sys.argv[1:], known=read_table(TABLE)))

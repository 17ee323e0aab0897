"""Print how long a process takes to start and end, without a sandbox and in each kind.

    python benchmarks/house/sandbox_start.py [PROCESSES]

The process is an interpreter that does nothing. Median of PROCESSES (20) of each, in turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

from flexq_bench.measure.sandbox import KINDS, Kind, Sandbox, obstacle


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    kinds: list[Kind] = ["none", *(kind for kind in KINDS if not obstacle(kind))]
    times_ms: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": os.environ["PATH"]}
        for _ in range(processes):
            for kind in kinds:
                sandbox = Sandbox(environment, kind)
                began = time.perf_counter()
                command = sandbox.wrap([sys.executable, "-I", "-S", "-c", "pass"])
                subprocess.run(command, env=environment, check=True)
                times_ms[kind].append(1e3 * (time.perf_counter() - began))
    for kind, times in times_ms.items():
        sys.stdout.write(f"{kind:12} {statistics.median(times):6.1f} ms\n")


if __name__ == "__main__":
    main()

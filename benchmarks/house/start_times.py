"""CPU seconds of the commands that people type most, on the demo's database: the least of 7 runs.

python benchmarks/house/start_times.py
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile

from flexq_bench.cli.demo import demo_database

COMMANDS = (
    "--help", "status", "list runs", "list kernels", "list models", "list suites", "list devices",
    "list series", "alerts list",
)  # fmt: skip
GOAL_S, REPEATS = 0.6, 7


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, demo_database() as database:
        environment = os.environ | {
            "FLEXQ_BENCH_DB": f"sqlite:///{database}",
            "FLEXQ_BENCH_CACHE": folder,
            "PYTHONPYCACHEPREFIX": folder,  # compiled once, as of an installed package
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for command in COMMANDS:
            # the first run compiles and stores what later ones read
            seconds = min([cpu_seconds(command, environment) for _ in range(REPEATS + 1)][1:])
            note = "" if seconds < GOAL_S else "  over the goal"
            sys.stdout.write(f"{command:14} {seconds:.2f}{note}\n")


def cpu_seconds(command: str, environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = [sys.executable, "-m", "flexq_bench", *command.split()]
    subprocess.run(program, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()

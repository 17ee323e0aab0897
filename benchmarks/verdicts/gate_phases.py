"""Run a command of flexq-bench, and print where its comparison spent its time.

    python benchmarks/verdicts/gate_phases.py gate perf --base v1 --head mine --project acme

Prints after the command, also after its end by SIGTERM: seconds of this process waiting for the
replies of workers, by request and side; in functions of this process that take long; and the rest.
`at`: when the first call of a row began, in seconds since the start of this process.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flexq_bench.cli.app import main
from flexq_bench.measure import external_kernels, judged_kernel, judged_places, worker_process
from flexq_bench.measure.ab import experiment, judged_sides, projects
from flexq_bench.measure.ab.worker_pairs import WorkerPairs
from flexq_bench.measure.launcher import ForkServer
from flexq_bench.measure.telemetry import Telemetry
from flexq_bench.measure.worker_process import WorkerProcess

_START = 19  # field of /proc/PID/stat after the name of the program
spent: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])  # calls, seconds
first_at: dict[str, float] = {}
inside: list[float] = []  # seconds of the timed calls in each timed call that runs now


def since_start(now: float) -> float:
    """Seconds since this process started, imports included, of a time of `perf_counter`."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_START])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
    return now - time.perf_counter() + age


def timed(name: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its own seconds added to `spent`; those of timed calls inside are not."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        inside.append(0.0)
        label = name if isinstance(name, str) else name(*arguments)
        first_at.setdefault(label, since_start(began))
        try:
            return function(*arguments, **options)
        finally:
            took = time.perf_counter() - began
            entry = spent[label]
            entry[0] += 1
            entry[1] += took - inside.pop()
            if inside:
                inside[-1] += took

    return call


def watch(owner: Any, *names: str) -> None:
    """Time functions of a class or module."""
    for name in names:
        setattr(owner, name, timed(name.strip("_"), getattr(owner, name)))


def report() -> None:
    """Print what is known."""
    whole = since_start(time.perf_counter())
    rest = whole - sum(seconds for _, seconds in spent.values())
    sys.stderr.write(f"{whole:8.2f} s in all\n{rest:8.2f} s elsewhere\n")
    for name, (calls, seconds) in sorted(spent.items(), key=lambda item: -item[1][1]):
        sys.stderr.write(
            f"{seconds:8.2f} s {calls:6.0f} x {1e3 * seconds / calls:8.1f} ms "
            f"at {first_at[name]:5.1f} {name}\n"
        )
    sys.stderr.flush()


def ended(number: int, frame: FrameType | None) -> NoReturn:
    """End as a command that was ended, after the report."""
    report()
    sys.exit(128 + number)


def run() -> None:
    """Run the command."""
    WorkerProcess.receive = timed(  # type: ignore[method-assign]
        lambda worker: f"worker {worker._operation} ({worker.name})", WorkerProcess.receive
    )
    watch(WorkerProcess, "close", "__init__", "send")
    watch(ForkServer, "reset", "start", "end")
    sides = judged_sides.JudgedSide
    watch(sides, "_timed")
    kernel = judged_kernel.JudgedKernel
    watch(kernel, "give_inputs", "_fill", "_outputs", "check_turn", "check_result")
    watch(worker_process, "stop_marked")
    watch(Telemetry, "__enter__", "__exit__")
    watch(experiment, "confirm", "comparison_of")
    watch(external_kernels, "described")
    watch(projects, "described", "is_same_project")
    watch(judged_places, "built_tree")
    watch(WorkerPairs, "take", "start_ahead")
    signal.signal(signal.SIGTERM, ended)
    try:
        main()
    finally:
        report()


if __name__ == "__main__":
    run()

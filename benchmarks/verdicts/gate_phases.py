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
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

_START = 19  # field of /proc/PID/stat after the name of the program
spent: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])  # calls, seconds
first_at: dict[str, float] = {}


class Nested(threading.local):
    """Seconds of the timed calls in each timed call that a thread runs now."""

    def __init__(self) -> None:
        self.seconds: list[float] = []


nested = Nested()


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
        inside = nested.seconds
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


# Functions to time, by module and, if they are methods, by class.
WATCHED: dict[str, dict[str, Sequence[str]]] = {
    "measure.worker_process": {
        "WorkerProcess": ("close", "__init__", "send"),
        "": ("stop_marked",),
    },
    "measure.launcher": {"ForkServer": ("reset", "start", "end")},
    "measure.ab.judged_sides": {"JudgedSide": ("_timed",)},
    "measure.judged_kernel": {
        "JudgedKernel": ("give_inputs", "_fill", "_outputs", "check_of_turn", "check_result")
    },
    "measure.telemetry": {"Telemetry": ("__enter__", "__exit__")},
    "measure.ab.experiment": {"": ("confirm", "comparison_of")},
    "measure.external_kernels": {"": ("described",)},
    "measure.judged_places": {"": ("built_tree", "judged_places", "forking_launcher")},
    "ci.gate_perf": {"": ("gate_perf",)},
    "measure.ab.projects": {"": ("described", "is_same_project")},
    "measure.ab.judged": {"": ("judged_tree", "same_code", "add_bytecode")},
    "measure.ab.worker_pairs": {"WorkerPairs": ("take", "start_ahead")},
}


def watch(module: ModuleType) -> None:
    """Time functions of a module that was just imported."""
    for name, functions in WATCHED[module.__name__.removeprefix("flexq_bench.")].items():
        owner: Any = getattr(module, name) if name else module
        for function in functions:
            setattr(owner, function, timed(function.strip("_"), getattr(owner, function)))
        if name == "WorkerProcess":
            owner.receive = timed(
                lambda worker: f"worker {worker._operation} ({worker.name})", owner.receive
            )


class Watching(MetaPathFinder, Loader):
    """Imports modules as ever, and then watches them: the command imports what it needs itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.removeprefix("flexq_bench.") not in WATCHED:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader, spec.loader = spec.loader, self
            spec.loader_state = loader
        return spec

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader_state.exec_module(module)
        watch(module)


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
    sys.meta_path.insert(0, Watching())
    signal.signal(signal.SIGTERM, ended)
    from flexq_bench.cli.app import main

    try:
        code = main()
    finally:
        report()
    sys.stdout.flush()
    os._exit(code)  # as flexq_bench.__main__ ends: torch's cleanup takes a second


if __name__ == "__main__":
    run()

"""Traces of `torch.profiler`: the launches of a running program with their counts and times."""

from __future__ import annotations

import hashlib
import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexq_bench.errors import UsageError
from flexq_bench.exchange.profiler_events import WHAT, trace_events
from flexq_bench.exchange.profiler_operators import (
    OPERATORS,
    NoWorkloadError,
    Workload,
    workload_of_call,
)
from flexq_bench.workloads.launches import Launch, LaunchTrace, Unmeasured, launch_trace

_MAX_KEPT = 10_000_000  # calls, launches and kernels together
_MAX_DISTINCT = 100_000  # names, threads, workloads
_MAX_NAME_CHARS = 100
_MAX_US = 1e18
# Marks of a step: of torch.profiler's schedule; of a forward pass of vLLM.
_STEP = re.compile(r"ProfilerStep#\d{1,12}|execute_(?:context|new)_.{0,80}")
_FROM_GRAPH = "launched by a CUDA graph, which records no shapes: profile without CUDA graphs"

_Kept = Workload | Unmeasured


def read_profiler_trace(path: str) -> LaunchTrace:
    """Read a trace: calls of known operators by workload, and kernels outside of them by name.

    An operator within another one counts as part of it: `aten::addmm` of `aten::linear`. Times are
    those of kernels launched within a call, or of the calls if the trace has no kernels (CPU).
    Raises UsageError if it is no trace, has no calls of known operators, or exceeds its bounds.
    """
    parts = _Parts(path)
    for event in trace_events(path):
        parts.add(event)
    return parts.result()


@dataclass(slots=True)
class _Parts:
    """Kept parts of events: numbers, and each text once."""

    path: str
    distinct: dict[Any, int] = field(default_factory=dict)
    calls: dict[tuple[str, bytes], int] = field(default_factory=dict)
    kept: list[_Kept | None] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    steps: set[str] = field(default_factory=set)
    forward_passes: int = 0
    call: tuple[array[int], array[float], array[float], array[int]] = field(
        default_factory=lambda: (array("q"), array("d"), array("d"), array("q"))
    )  # thread, begin, end, index of calls
    launch: tuple[array[int], array[float], array[int], array[int]] = field(
        default_factory=lambda: (array("q"), array("d"), array("q"), array("b"))
    )  # thread, begin, correlation, 1: of a graph
    kernel: tuple[array[int], array[float], array[int]] = field(
        default_factory=lambda: (array("q"), array("d"), array("q"))
    )  # correlation, duration, name

    def add(self, event: Mapping[str, Any]) -> None:
        """Keep an event if it is a call of a known operator, a launch, a kernel or a step."""
        name, category = event.get("name"), event.get("cat")
        if event.get("ph") != "X" or not isinstance(name, str):
            return
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        if category == "user_annotation":
            if _STEP.fullmatch(name):
                self._mark(name)
            return
        begin, duration = _time(event.get("ts")), _time(event.get("dur"))
        if begin is None or duration is None:
            return
        if category in ("cpu_op", "Operator") and name in OPERATORS:
            _append(self.call, self._thread(event), begin, begin + duration, self._of(event))
        elif category in ("cuda_runtime", "cuda_driver") and "Launch" in name:
            if (correlation := _integer(arguments.get("correlation"))) is not None:
                graph = int("Graph" in name)
                _append(self.launch, self._thread(event), begin, correlation, graph)
        elif category == "kernel":
            correlation = _integer(arguments.get("correlation"))
            index = self._index(name[:_MAX_NAME_CHARS])
            _append(self.kernel, -1 if correlation is None else correlation, duration, index)
        if len(self.call[0]) + len(self.launch[0]) + len(self.kernel[0]) > _MAX_KEPT:
            raise UsageError(f"{self.path} has over {_MAX_KEPT:,} calls and kernels: profile less")

    def result(self) -> LaunchTrace:
        """Return the trace of the kept events. Raises UsageError if it has no calls."""
        thread, begin, end, index = (np.asarray(part) for part in self.call)
        if not len(thread):
            raise UsageError(f"{self.path} has no call of a known operator: name {WHAT}")
        order = np.lexsort((-end, begin, thread))
        thread, begin, end, index = (part[order] for part in (thread, begin, end, index))
        outer = _outermost(thread, begin, end)
        thread, begin, end, index = (part[outer] for part in (thread, begin, end, index))
        counts = np.bincount(index, minlength=len(self.kept))
        rest: list[Unmeasured] = []
        if self.kernel[0]:
            times, rest = self._kernel_times(thread, begin, end, index)
        else:
            times = _sums(index, end - begin, len(self.kept))
        totals: dict[_Kept, tuple[str, int, float]] = {}
        for kept, source, count, us in zip(self.kept, self.sources, counts, times, strict=True):
            if kept is not None and count:
                first, calls, time = totals.get(kept, (source, 0, 0.0))
                totals[kept] = (first, calls + int(count), time + float(us))
        launches = []
        for kept, (source, calls, time) in totals.items():
            if isinstance(kept, Unmeasured):
                rest.append(replace(kept, count=calls, traced_us=time))
            else:
                launches.append(Launch(kept, source, calls, time))
        steps = len(self.steps) or self.forward_passes or None
        return launch_trace(launches, rest, steps)

    def _kernel_times(
        self,
        thread: NDArray[np.int64],
        begin: NDArray[np.float64],
        end: NDArray[np.float64],
        index: NDArray[np.int64],
    ) -> tuple[NDArray[np.float64], list[Unmeasured]]:
        """Return the time of each kept call's kernels, and the kernels of no call by name."""
        correlation, duration, name = (np.asarray(part) for part in self.kernel)
        of_launch = np.full(len(correlation), -1)
        from_graph = np.zeros(len(correlation), bool)
        launch_thread, launch_begin, ids, graph = (np.asarray(part) for part in self.launch)
        if len(ids):
            by_id = np.argsort(ids, kind="stable")
            place = np.minimum(np.searchsorted(ids[by_id], correlation), len(ids) - 1)
            launch = by_id[place]
            known = ids[launch] == correlation
            from_graph = known & (graph[launch] == 1)
            of_launch[known] = _calls_at(
                (launch_thread[launch][known], launch_begin[launch][known]),
                (thread, begin, end, index),
            )
        inside = of_launch >= 0
        times = _sums(of_launch[inside], duration[inside], len(self.kept))
        texts = list(self.distinct)
        rest = []
        for reason, chosen in (
            (_FROM_GRAPH, ~inside & from_graph),
            ("outside of known operators", ~inside & ~from_graph),
        ):
            counts = np.bincount(name[chosen])
            sums = np.bincount(name[chosen], duration[chosen])
            rest += [
                Unmeasured(texts[i], reason, int(counts[i]), float(sums[i]))
                for i in np.flatnonzero(counts)
            ]
        return times, rest

    def _of(self, event: Mapping[str, Any]) -> int:
        """Return the index of a call's workload, or of the reason why it has none."""
        name, arguments = str(event["name"]), event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        shapes = (arguments.get("Input Dims"), arguments.get("Concrete Inputs"))
        key = (name, hashlib.blake2b(repr(shapes).encode()).digest())
        if key not in self.calls:
            self._check(len(self.calls))
            kept: _Kept | None
            try:
                kept = workload_of_call(name, arguments)
            except NoWorkloadError as error:
                kept = Unmeasured(name, str(error), 0)
            self.calls[key] = len(self.kept)
            self.kept.append(kept)
            self.sources.append(name)
        return self.calls[key]

    def _mark(self, name: str) -> None:
        if name.startswith("ProfilerStep"):
            self._check(len(self.steps))
            self.steps.add(name)
        else:
            self.forward_passes += 1

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self._index(("thread", *(str(event.get(key))[:40] for key in ("pid", "tid"))))

    def _index(self, value: Any) -> int:
        if value not in self.distinct:
            self._check(len(self.distinct))
            self.distinct[value] = len(self.distinct)
        return self.distinct[value]

    def _check(self, count: int) -> None:
        if count >= _MAX_DISTINCT:
            raise UsageError(
                f"{self.path} has over {_MAX_DISTINCT:,} names or shapes: profile less"
            )


def _sums(index: NDArray[np.int64], values: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return the sum of the values of each index below count."""
    sums = np.zeros(count)
    np.add.at(sums, index, values)
    return sums


def _append(columns: tuple[Any, ...], *values: float) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _calls_at(
    place: tuple[NDArray[np.int64], NDArray[np.float64]],
    calls: tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Return the index of the call that contains each moment of a thread; -1: none does.

    calls: thread, begin, end and index, of disjoint intervals sorted by thread and begin.
    """
    indices = np.full(len(place[0]), -1)
    for of in np.unique(place[0]):
        begin, end, index = (part[calls[0] == of] for part in calls[1:])
        if not len(begin):
            continue
        moments = place[1][place[0] == of]
        last = np.searchsorted(begin, moments, side="right") - 1
        inside = (last >= 0) & (moments <= end[last])
        indices[place[0] == of] = np.where(inside, index[last], -1)
    return indices


def _outermost(
    thread: NDArray[np.int64], begin: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Mark the intervals that lie in no other one of their thread. Sorted by thread and begin."""
    outer = np.zeros(len(thread), bool)
    last, until = -1, -math.inf
    for i, (of, start, stop) in enumerate(
        zip(thread.tolist(), begin.tolist(), end.tolist(), strict=True)
    ):
        if of != last or start >= until:
            outer[i], last, until = True, of, stop
    return outer


def _time(value: Any) -> float | None:
    """Return a time in us, as of the trace; None: it is none."""
    if isinstance(value, str):  # of some versions
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _MAX_US else None


def _integer(value: Any) -> int | None:
    is_id = type(value) is int and 0 <= value < 1 << 62
    return value if is_id else None

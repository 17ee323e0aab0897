"""Workloads that a running program launched, with their counts, as read from a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload


@dataclass(frozen=True, slots=True)
class Launch:
    """A workload and the number of times that the program computed it.

    source: name of the operator or definition in the trace. traced_us: time of all of them
    together, on the GPU if there is one; None: the trace has no times.
    """

    workload: GemmWorkload | OperationWorkload
    source: str
    count: int
    traced_us: float | None = None


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """Work in a trace that has no workload. reason: why. Other fields as of Launch."""

    source: str
    reason: str
    count: int
    traced_us: float | None = None


@dataclass(frozen=True, slots=True)
class LaunchTrace:
    """Launches in a trace, and the rest of it, both by cost: traced time, else operations.

    steps: of the program, as marked in the trace; None: it marks none.
    """

    launches: tuple[Launch, ...]
    unmeasured: tuple[Unmeasured, ...] = ()
    steps: int | None = None

    @property
    def traced_us(self) -> float | None:
        """Time of everything; None: the trace has no times."""
        parts: tuple[Launch | Unmeasured, ...] = (*self.launches, *self.unmeasured)
        times = [part.traced_us for part in parts if part.traced_us is not None]
        return sum(times) if times else None


def launch_trace(
    launches: Iterable[Launch], unmeasured: Iterable[Unmeasured] = (), steps: int | None = None
) -> LaunchTrace:
    """Return a trace with its parts in order."""

    def cost(launch: Launch) -> tuple[float, float, str]:
        operations = launch.count * (launch.workload.operations or 0)
        return -(launch.traced_us or 0.0), -operations, launch.workload.key

    rest = sorted(unmeasured, key=lambda part: (-(part.traced_us or 0.0), -part.count, part.source))
    return LaunchTrace(tuple(sorted(launches, key=cost)), tuple(rest), steps)

"""Timeouts and intervals of the fleet, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from flexq_bench.errors import UsageError
from flexq_bench.workloads.names import unknown

MAX_S = 604_800.0  # a week


@dataclass(frozen=True, slots=True)
class Times:
    """Timeouts and intervals; set with `--times lease=120,case=600` or FLEXQ_BENCH_TIMES.

    start: until a worker is ready. case: until a result; then the worker's process is replaced.
    compare: the same for a comparison of up to 16 cases, with the builds of its commits. beat:
    interval of heartbeats, which renew leases. lease: a job whose lease was not renewed for this
    time can be leased to another worker. device: until a GPU of a kind with queued jobs becomes
    available (again), if no process is being started. scan: interval of checks for new nodes.
    database: longest outage of the database.
    """

    start: float = 180.0
    case: float = 300.0
    compare: float = 3600.0
    beat: float = 10.0
    lease: float = 60.0
    device: float = 120.0
    scan: float = 10.0
    database: float = 600.0

    def __post_init__(self) -> None:
        for item in fields(self):
            if not 0 < getattr(self, item.name) <= MAX_S:
                raise UsageError(
                    f"--times {item.name}={getattr(self, item.name):g}: must be above 0 and at "
                    f"most {MAX_S:,.0f} s"
                )
        if self.lease < 2 * self.beat:
            raise UsageError(
                f"--times lease={self.lease:g}: a lease of less than two beats ({self.beat:g} s) "
                "expires while its worker is alive"
            )


def parse_times(text: str | None) -> Times:
    """Parse `lease=120,case=600`; missing values have their defaults. Raises UsageError."""
    values: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in (text or "").split(","))):
        name, _, number = part.partition("=")
        names = [item.name for item in fields(Times)]
        if name not in names:
            raise UsageError(unknown("time", name, names))
        try:
            values[name] = float(number)
        except ValueError:
            raise UsageError(f"--times {part}: write {name}=SECONDS") from None
    return replace(Times(), **values)

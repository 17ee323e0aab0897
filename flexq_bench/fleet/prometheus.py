"""The fleet's state in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from flexq_bench.db import queries
from flexq_bench.db.decisions import OPEN_STATES
from flexq_bench.db.dialects import database_time
from flexq_bench.db.engine import Session
from flexq_bench.db.records import RUN_STATUSES
from flexq_bench.fleet.watchdog import stalls

_NIGHTS = 400  # rows read: enough to include the latest of each suite and kind of GPU
_Sample = tuple[Mapping[str, str], float]
_ESCAPED = {"\\": r"\\", '"': r"\"", "\n": r"\n"}


_DATABASE = (
    "# HELP flexq_database_up Whether the database answers.\n# TYPE flexq_database_up gauge\n"
)
OUTAGE = f"{_DATABASE}flexq_database_up 0\n"  # the only metric while the database is unavailable


def prometheus_text(session: Session) -> str:
    """Metrics of unfinished runs, live workers and requests, in the text format 0.0.4."""
    now = database_time(session)
    runs = queries.progress(session)
    workers = queries.workers(session, live=True)
    requests = Counter(row.state for row in queries.requests(session, states=("queued", "running")))
    nights: dict[tuple[str, str], queries.NightState] = {}
    done: dict[tuple[str, str], queries.NightState] = {}
    for night in queries.night_states(session, limit=_NIGHTS):  # the latest first
        nights.setdefault((night.suite, night.gpu), night)
        if night.state == "done":
            done.setdefault((night.suite, night.gpu), night)
    unfinished = queries.unfinished_nights(session)
    states = queries.comparison_states(session, [night.run for night in unfinished])
    comparisons: Counter[tuple[str, str]] = Counter()
    for night in unfinished:
        for state, count in states.get(night.run, {}).items():
            comparisons[night.gpu, state] += count
    parts = (
        _metric(
            "flexq_jobs",
            "Jobs of unfinished runs by state.",
            (
                ({"run": run.run, "suite": run.suite, "state": state}, count)
                for run in runs
                for state, count in run.states.items()
            ),
        ),
        _metric(
            "flexq_expected_gpu_seconds",
            "Seconds on one GPU that the open jobs of a run are expected to take.",
            (({"run": run.run, "suite": run.suite}, run.expected_s) for run in runs),
        ),
        _metric(
            "flexq_workers",
            "Live workers by kind of GPU and state.",
            (
                ({"gpu": gpu, "state": state}, count)
                for (gpu, state), count in sorted(
                    Counter((w.gpu, w.state) for w in workers).items()
                )
            ),
        ),
        _metric(
            "flexq_worker_silent_seconds",
            "Seconds since a worker's last heartbeat.",
            (
                ({"worker": w.uuid, "host": w.host}, (now - w.heartbeat_at).total_seconds())
                for w in workers
            ),
        ),
        _metric(
            "flexq_worker_temperature_celsius",
            "Temperature of a worker's GPU after its last result.",
            (
                ({"worker": w.uuid, "host": w.host}, w.temperature_c)
                for w in workers
                if w.temperature_c is not None
            ),
        ),
        _metric(
            "flexq_night_age_seconds",
            "Seconds since the latest night's state last changed, by that state.",
            (
                (
                    {"suite": night.suite, "gpu": night.gpu, "state": night.state},
                    (now - night.updated_at).total_seconds(),
                )
                for night in nights.values()
            ),
        ),
        _metric(
            "flexq_night_last_success_seconds",
            "Seconds since a night was last concluded.",
            (
                (
                    {"suite": night.suite, "gpu": night.gpu},
                    (now - night.updated_at).total_seconds(),
                )
                for night in done.values()
            ),
        ),
        _metric(
            "flexq_unfinished_night_seconds",
            "Seconds since an unfinished night's state last changed, by that state.",
            (
                (
                    {"night": n.name, "suite": n.suite, "gpu": n.gpu, "state": n.state},
                    (now - n.updated_at).total_seconds(),
                )
                for n in unfinished
            ),
        ),
        _metric(
            "flexq_comparisons",
            "Jobs that compare commits, of unfinished nights, by state.",
            (
                ({"gpu": gpu, "state": state}, count)
                for (gpu, state), count in sorted(comparisons.items())
            ),
        ),
        _metric(
            "flexq_open_alerts",
            "Open alerts by state.",
            (
                ({"state": state}, count)
                for state, count in sorted(
                    Counter(a.state for a in queries.alerts(session, states=OPEN_STATES)).items()
                )
            ),
        ),
        _metric(
            "flexq_requests",
            "Queued and running requests by state.",
            (({"state": state}, requests[state]) for state in ("queued", "running")),
        ),
    )
    return "".join((*parts, *_health(session, now)))


def _health(session: Session, now: datetime) -> Iterator[str]:
    """Yield metrics of the database, of failures, of the queue and of stalls."""
    health = queries.health(session)
    yield f"{_DATABASE}flexq_database_up 1\n"
    yield _metric(
        "flexq_runs",
        "Runs by status.",
        (({"status": status}, health.runs.get(status, 0)) for status in RUN_STATUSES),
    )
    yield _metric(
        "flexq_quarantined_jobs", "Jobs that ended too many workers.", [({}, health.quarantined)]
    )
    yield _metric(
        "flexq_queue_depth",
        "Jobs and requests that wait for a worker.",
        [({"of": "jobs"}, health.queued_jobs), ({"of": "requests"}, health.queued_requests)],
    )
    until = health.lease_until
    overdue: list[_Sample] = [] if until is None else [({}, (now - until).total_seconds())]
    yield _metric(
        "flexq_lease_overdue_seconds",
        "Seconds since the earliest lease expired; negative: until it expires.",
        overdue,
    )
    yield _metric(
        "flexq_stalled_seconds",
        "Seconds that a stalled run, night or request has been without progress.",
        (({"what": stall.what, "name": stall.name}, stall.seconds) for stall in stalls(session)),
    )


def _metric(name: str, meaning: str, samples: Iterable[_Sample]) -> str:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
    for labels, value in samples:
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{pairs}}} {value:g}" if pairs else f"{name} {value:g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(_ESCAPED.get(letter, letter) for letter in text)

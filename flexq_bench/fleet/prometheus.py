"""The fleet's state as Prometheus reads it: text, one sample a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from db import queries
from db.clock import database_time
from db.engine import Session

_Sample = tuple[Mapping[str, str], float]
_ESCAPED = {"\\": r"\\", '"': r"\"", "\n": r"\n"}


def prometheus_text(session: Session) -> str:
    """Metrics of unfinished runs, live workers and requests, in the text format 0.0.4."""
    now = database_time(session)
    runs = queries.progress(session)
    workers = queries.workers(session, live=True)
    requests = Counter(row.state for row in queries.requests(session, states=("queued", "running")))
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
            "Seconds since a worker's last sign of life.",
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
            "flexq_requests",
            "Requests that wait or are measured, by state.",
            (({"state": state}, requests[state]) for state in ("queued", "running")),
        ),
    )
    return "".join(parts)


def _metric(name: str, meaning: str, samples: Iterable[_Sample]) -> str:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
    for labels, value in samples:
        shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{shown}}} {value:g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return "".join(_ESCAPED.get(letter, letter) for letter in text)

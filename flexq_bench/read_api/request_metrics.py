"""Requests of the server by path and status, in Prometheus' text format 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class RequestMetrics:
    """Counts answered requests. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._times: dict[str, list[int]] = defaultdict(lambda: [0] * (len(_BOUNDS_S) + 1))
        self._seconds: Counter[str] = Counter()

    def add(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count a request. path: of the route, such as /v1/series/{id}."""
        self._requests[path, method, status] += 1
        self._times[path][bisect_left(_BOUNDS_S, seconds)] += 1
        self._seconds[path] += seconds  # type: ignore[assignment]

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Return all metrics. gauges: further ones, each with its meaning and its value."""
        lines = [
            "# HELP flexq_api_requests_total Requests answered since the start.",
            "# TYPE flexq_api_requests_total counter",
        ]
        lines += [
            f'flexq_api_requests_total{{path="{path}",method="{method}",status="{status}"}} {count}'
            for (path, method, status), count in sorted(self._requests.items())
        ]
        lines += [
            "# HELP flexq_api_request_seconds Time from a request to its answer.",
            "# TYPE flexq_api_request_seconds histogram",
            *self._histograms(),
        ]
        for name, (meaning, value) in gauges.items():
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge", f"{name} {value!r}"]
        return "\n".join([*lines, ""])

    def _histograms(self) -> Iterable[str]:
        for path, counts in sorted(self._times.items()):
            bounds = (*map(str, _BOUNDS_S), "+Inf")
            for bound, count in zip(bounds, accumulate(counts), strict=True):
                yield f'flexq_api_request_seconds_bucket{{path="{path}",le="{bound}"}} {count}'
            yield f'flexq_api_request_seconds_sum{{path="{path}"}} {self._seconds[path]!r}'
            yield f'flexq_api_request_seconds_count{{path="{path}"}} {sum(counts)}'

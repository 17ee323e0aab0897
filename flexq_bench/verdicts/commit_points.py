"""One point per commit: the re-runs of a commit are one piece of evidence of its level."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a worker needs no SQLAlchemy
    from flexq_bench.db.queries.series import Point


def one_per_commit(points: Sequence[Point]) -> list[Point]:
    """Combine the results of each commit within an epoch; every rule on histories counts these.

    points: of one series, as `db.queries.series_history` returns them. The value is the median of
    the results on one device, and `reruns` has all of them, as evidence of noise. Of several
    devices it is the one of the commit before, else the one with the most commits of the epoch. The
    other fields are those of the device's first result.
    """
    if len({point.commit for point in points}) == len(points):
        return list(points)
    by_commit: dict[tuple[int, str], list[Point]] = defaultdict(list)
    for point in points:
        by_commit[point.epoch, point.commit].append(point)
    seen = {(point.epoch, point.commit, point.device) for point in points}
    commits = Counter((epoch, device) for epoch, _, device in seen)
    combined: list[Point] = []
    for (epoch, _), results in by_commit.items():
        devices = {result.device for result in results}
        device = combined[-1].device if combined else -1
        if device not in devices:
            device = max(devices, key=lambda device: (commits[epoch, device], -device))
        chosen = [result for result in results if result.device == device]
        values = tuple(result.median_us for result in chosen)
        if len(values) == 1:
            combined.append(chosen[0])
        else:
            value = statistics.median(values)
            combined.append(replace(chosen[0], median_us=value, reruns=values))
    return combined

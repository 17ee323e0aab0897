"""One point per commit."""

from __future__ import annotations

from datetime import UTC, datetime

from flexq_bench.db.queries import HistoryPoint
from flexq_bench.verdicts.commit_points import one_per_commit


def point(commit, value, *, device=1, epoch=1):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return HistoryPoint(
        *(commit, 1, epoch, "run", "measurement", at, value),
        *(None, None, None, None),
        device=device,
    )


def values(points):
    return [(one.commit, one.median_us, one.reruns) for one in one_per_commit(points)]


def test_value_of_a_commit_is_the_median_of_its_reruns():
    points = [point("a", 1.0), point("b", 5.0), point("b", 2.0), point("b", 3.0)]

    assert values(points) == [("a", 1.0, ()), ("b", 3.0, (5.0, 2.0, 3.0))]


def test_epochs_of_a_commit_stay_apart():
    assert values([point("a", 1.0), point("a", 2.0, epoch=2)]) == [("a", 1.0, ()), ("a", 2.0, ())]


def test_point_is_of_the_device_of_the_commit_before():
    points = [point("a", 1.0), point("b", 9.0, device=2), point("b", 2.0), point("c", 3.0)]

    assert values(points) == [("a", 1.0, ()), ("b", 2.0, ()), ("c", 3.0, ())]


def test_first_point_is_of_the_device_with_most_commits():
    points = [point("a", 9.0), point("a", 1.0, device=2), point("b", 2.0, device=2)]

    assert values(points) == [("a", 1.0, ()), ("b", 2.0, ())]

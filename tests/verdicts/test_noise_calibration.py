"""A/A calibration: noise and the live false-alarm rate, from commits compared with themselves."""

from __future__ import annotations

import pytest

from flexq_bench.db import queries
from flexq_bench.verdicts.noise_calibration import WINDOW


def canaries(record, compared, count, *, ratio=lambda night: 1.0, first=1, **changes):
    for night in range(first, first + count):
        one = compared("flexq-w6a6", ratio(night), base=night, head=night, **changes)
        record(one, night=night)


def only_page(session):
    (page,) = queries.aa_calibration(session)
    return page


def test_five_canaries_give_a_series_its_floor(session, record, compared):
    canaries(record, compared, 4)
    assert only_page(session).noise_floor is None

    canaries(record, compared, 1, first=5)

    page = only_page(session)
    assert page.comparisons == 5
    assert 0 < page.noise_floor < 0.002
    assert page.smallest_step > 0.0099


def test_the_floor_is_used_the_next_night(session, record, compared):
    canaries(record, compared, 6, ratio=lambda night: 1.12 if night % 2 else 1.0)

    night = record(compared("flexq-w6a6", 1.05, base=7, head=8), night=7)

    floor = only_page(session).noise_floor
    assert floor > 0.12
    assert night.judged[0].evidence.comparison.noise_floor == floor
    assert queries.alerts(session) == []


def test_repeated_calibration_changes_nothing(session, record, compared):
    canaries(record, compared, 5)
    before = (queries.aa_calibration(session), queries.false_alarm_rates(session))
    canaries(record, compared, 5)

    assert (queries.aa_calibration(session), queries.false_alarm_rates(session)) == before


def test_slower_canary_is_a_false_alarm(session, record, compared):
    canaries(record, compared, 10, ratio=lambda night: 1.05 if night == 3 else 1.0)

    newest = queries.false_alarm_rates(session)[0]
    assert (newest.canaries, newest.alarms, newest.rate) == (10, 1, 0.1)
    assert (newest.low, newest.high) == (
        pytest.approx(0.0025, abs=1e-4),
        pytest.approx(0.445, abs=1e-3),
    )
    assert queries.alerts(session) == []


def test_false_alarm_rate_is_stored_over_time(session, record, compared):
    canaries(record, compared, 3)

    rates = queries.false_alarm_rates(session)
    assert [rate.canaries for rate in rates] == [3, 2, 1]
    assert queries.false_alarm_rates(session, limit=1) == rates[:1]


def test_unjudged_comparison_is_no_canary(session, record, compared):
    canaries(record, compared, 1, placements=2)
    canaries(record, compared, 1, first=2, correct=False)

    assert queries.aa_calibration(session) == []
    assert queries.false_alarm_rates(session) == []


def test_old_canaries_do_not_count(session, record, compared):
    canaries(record, compared, 2)
    record(compared("flexq-w6a6", base=3, head=3), night=WINDOW.days + 2)

    assert only_page(session).comparisons == 2
    assert queries.false_alarm_rates(session)[0].canaries == 2


def test_comparison_of_two_commits_is_no_canary(session, record, compared):
    record(compared("flexq-w6a6"))

    assert queries.aa_calibration(session) == []

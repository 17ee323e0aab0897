"""Which failures count, how often work is tried again, and how soon."""

from __future__ import annotations

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet import retry_policy


def test_a_job_is_given_up_at_its_third_death():
    assert [retry_policy.is_quarantined(deaths) for deaths in (1, 2, 3)] == [False, False, True]
    assert "3 workers ended" in retry_policy.quarantine_detail(3)


def test_a_device_is_tried_at_once_then_after_pauses_that_double_up_to_a_minute():
    assert [retry_policy.pause_s(failures) for failures in (1, 2, 3, 9)] == [0.0, 4.0, 8.0, 60.0]
    assert [retry_policy.is_given_up(failures) for failures in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize(
    ("error", "reason", "alive", "blameless"),
    [
        (RuntimeError(), "the process ended", True, False),
        (InfrastructureError("the device is broken"), "the device is broken", True, True),
        (RuntimeError(), "the process ended", False, True),
        (RuntimeError(), "The actor died because its node has died.", True, True),
    ],
)
def test_only_what_the_job_may_have_done_counts_against_it(error, reason, alive, blameless):
    assert retry_policy.is_blameless(error, reason, node_is_alive=alive) == blameless

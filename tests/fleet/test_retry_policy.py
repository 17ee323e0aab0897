"""Retry policy, and reasons of lost workers."""

from __future__ import annotations

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet import retry_policy
from flexq_bench.fleet.ray_actors import reason_of

exceptions = pytest.importorskip("ray.exceptions")

BUSY = "1 other processes compute on NVIDIA H200: end them"
TRACEBACK = f"""Traceback (most recent call last):
  File "actor.py", line 50, in __init__
    _wait_until_alone(self._meter)
flexq_bench.errors.InfrastructureError: {BUSY}"""
DEATH = """The actor died unexpectedly before finishing this task.
\tclass_name: MeterActor
\tactor_id: f7c3ffd74752c47c9cf32a9d01000000
\tpid: 26226
"""


def raised_in_an_actor():
    error = InfrastructureError(BUSY)
    return exceptions.RayTaskError("measure", TRACEBACK, error, "actor", pid=1, ip="127.0.0.1")


def died(why):
    return exceptions.RayActorError(error_msg=DEATH + why)


def test_job_is_quarantined_at_its_third_death():
    assert [retry_policy.is_quarantined(deaths) for deaths in (1, 2, 3)] == [False, False, True]
    assert "3 workers ended" in retry_policy.quarantine_detail(3)


def test_pauses_double_up_to_a_minute():
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
def test_only_failures_of_the_job_count_against_it(error, reason, alive, blameless):
    assert retry_policy.is_blameless(error, reason, node_is_alive=alive) == blameless


@pytest.mark.parametrize(
    "error",
    [raised_in_an_actor().as_instanceof_cause(), exceptions.ActorDiedError(raised_in_an_actor())],
    ids=["while it measured", "when it started"],
)
def test_reason_of_an_actor_error_has_no_traceback(error):
    assert reason_of(error) == BUSY


def test_reason_of_a_death_has_no_general_advice():
    why = "Its worker process has died. End of file. Some common causes include: (1) a node …"

    assert reason_of(died(why)) == "Its worker process has died. End of file."


def test_reason_of_an_error_without_message_is_its_class():
    assert reason_of(TimeoutError()) == "TimeoutError"

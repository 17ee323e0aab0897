"""What people read when a worker is lost, from exceptions that Ray really raises."""

from __future__ import annotations

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet.exit_reasons import is_of_node, reason_of

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


@pytest.mark.parametrize(
    "error",
    [raised_in_an_actor().as_instanceof_cause(), exceptions.ActorDiedError(raised_in_an_actor())],
    ids=["while it measured", "when it started"],
)
def test_what_an_actor_raised_is_said_without_its_traceback(error):
    assert reason_of(error) == BUSY


def test_a_death_is_said_without_general_advice():
    why = "Its worker process has died. End of file. Some common causes include: (1) a node …"

    assert reason_of(died(why)) == "Its worker process has died. End of file."
    assert not is_of_node(reason_of(died(why)))


def test_a_node_s_death_is_told_from_a_process_s():
    assert is_of_node(reason_of(died("The actor died because its node has died. Node Id: 4f")))


def test_an_error_without_words_has_its_name():
    assert reason_of(TimeoutError()) == "TimeoutError"

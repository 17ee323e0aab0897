"""Two projects in one database: what waits and which devices are missed is of each alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_nightly import SUITE, MadePool, unseen

from ci.nightly import Rules, conclude, measure_night
from db import queries


@pytest.fixture
def a_night(database, commits, sha, compared):
    """a_night("acme", 3): the report on the third commit's night; nothing is compared."""

    def run(project, order, *, us=20.0, gpu="A CPU"):
        name = sha(order) if not project else f"{order:x}" * 40
        commit = replace(commits[sha(order)], sha=name, project=project)
        pool = MadePool(database, commit, compared, us=us, gpus=(gpu,))
        rules = Rules(f"2025-11-{order:02}", None, canaries=0, candidates=0)
        nights = measure_night(database, pool, SUITE, commit, rules, progress=unseen)
        [report] = [conclude(database, pool, info, commit, rules) for info in nights]
        return report

    return run


def test_devices_of_another_project_are_not_missed(a_night, database):
    a_night("", 1)
    a_night("acme", 2, gpu="Their GPU")

    with database.session() as session:
        [theirs] = queries.night_states(session, project="acme")
        [ours] = queries.night_states(session, project="")
    assert (theirs.gpu, ours.gpu) == ("Their GPU", "A CPU")


def test_what_waits_in_another_project_is_not_ours(a_night):
    for order in range(1, 8):
        a_night("", order)
    waiting = a_night("", 8, us=22.0)
    for order in range(1, 8):
        a_night("acme", order)
    theirs = a_night("acme", 8, us=22.0)

    assert [nights for _, nights, _ in waiting.not_compared] == [1] * waiting.candidates
    assert [nights for _, nights, _ in theirs.not_compared] == [1] * theirs.candidates

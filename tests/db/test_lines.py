"""Places of commits on lines of history."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy import select

from flexq_bench.db import queries
from flexq_bench.db.ancestry import Ancestry, Tip
from flexq_bench.db.lines import known_history, store_ancestry
from flexq_bench.db.store import add_records
from flexq_bench.db.tables import Device

AT = datetime(2026, 1, 1, tzinfo=UTC)


def sha(number):
    return f"{number:040x}"


@pytest.fixture
def measure(session, build, add):
    """measure(3): stores a result of the commit 3, whose ancestry the record does not name."""

    def give(number, **changes):
        made = build.a_commit(number, parent=None, topo_order=None, **changes)
        add(f"of {number}", commit=made)

    return give


def told(session, parents, *, name="main", at=AT, **others):
    """Store parents, {child: (parents)}, and the branch's tip: the first of them."""
    tip = Tip(sha(next(iter(parents))), at)
    edges = {sha(child): tuple(map(sha, several)) for child, several in parents.items()}
    ancestry = Ancestry("", edges, {name: tip}, "main")
    store_ancestry(session, replace(ancestry, **others), at=at)


def line(session, branch=None):
    (series,) = queries.series_names(session)
    return [int(p.commit, 16) for p in queries.series_history(session, series.id, branch=branch)]


def test_parents_come_before_children_whatever_the_times(session, measure):
    for number in (3, 1, 2):
        measure(number, committed_at=f"2025-01-0{4 - number}T00:00:00+00:00")
    assert line(session) == [3, 2, 1]

    told(session, {3: (2,), 2: (1,), 1: ()})
    assert line(session) == [1, 2, 3]


def test_distances_count_commits_that_were_not_measured(session, measure):
    measure(1)
    measure(5)
    told(session, {5: (4,), 4: (3,), 3: (2,), 2: (1,), 1: ()})

    rows = [queries.commit_row(session, sha(number)) for number in (1, 5)]
    assert [row.topo_order for row in rows] == [1, 5]


def test_longer_line_changes_no_place(session, measure):
    for number in (1, 2, 3):
        measure(number)
    told(session, {2: (1,), 1: ()})
    told(session, {9: (1,)}, name="side")
    before = [queries.commit_row(session, sha(number)).topo_order for number in (1, 2)]
    told(session, {3: (2,)})

    after = [queries.commit_row(session, sha(number)).topo_order for number in (1, 2)]
    assert before == after


def test_branch_that_was_deleted_keeps_its_line(session, measure):
    for number in (1, 2, 3):
        measure(number)
    told(session, {2: (1,), 1: ()})
    told(session, {3: (1,)}, name="feature")
    told(session, {2: (1,)}, deleted=("feature",))

    assert (line(session), line(session, "feature")) == ([1, 2], [1, 3])
    assert "feature" not in known_history(session, "").tips


def test_unrelated_branch_is_not_joined_to_main(session, measure):
    measure(1)
    told(session, {1: ()})
    told(session, {7: ()}, name="gh-pages")
    measure(7)

    assert line(session) == [1]


def test_commit_that_a_branch_reaches_again_is_back(session, measure):
    for number in (1, 2, 3):
        measure(number)
    told(session, {2: (1,), 1: ()})
    told(session, {3: (1,)})
    assert line(session) == [1, 3]

    told(session, {2: (1,)}, name="rescued")
    assert line(session, "rescued") == [1, 2]


def test_devices_are_numbered_in_the_order_of_their_results(session, build):
    names = [f"GPU-{number}" for number in range(20)]
    records = [build.a_record(name, device=build.a_device(uuid=name)) for name in names]
    add_records(session, records)

    assert list(session.scalars(select(Device.uuid).order_by(Device.id))) == names


def test_uncertain_tip_behind_the_stored_one_is_ignored(session, measure):
    for number in (1, 2):
        measure(number)
    told(session, {2: (1,), 1: ()})
    behind = {"main": Tip(sha(1), AT, is_certain=False)}
    store_ancestry(session, Ancestry("", {}, behind, "main"), at=AT)

    assert line(session) == [1, 2]


def test_commits_measured_on_a_merged_branch_stay_on_its_line(session, measure):
    for number, branch in ((1, "main"), (2, "main"), (5, "feature"), (6, "feature"), (3, "main")):
        measure(number, branch=branch)
    told(session, {2: (1,), 1: ()})
    told(session, {6: (5,), 5: (1,)}, name="feature")
    assert (line(session), line(session, "feature")) == ([1, 2, 3], [1, 5, 6])

    told(session, {3: (2, 6)})  # merges it

    assert line(session) == [1, 2, 3]
    assert line(session, "feature") == [1, 5, 6]
    told(session, {3: (2, 6)}, deleted=("feature",))
    assert (line(session), line(session, "feature")) == ([1, 2, 3], [1, 5, 6])
    row = queries.commit_row(session, sha(5))
    assert row.topo_order is None
    assert not queries.is_orphaned(session, sha(5), project="")


@pytest.mark.parametrize("is_merged", [False, True])
def test_commits_of_a_detached_checkout_stay_on_their_branch(session, measure, is_merged):
    """They name no branch: a branch that is merged before or after reaches them."""
    told(session, {2: (1,), 1: ()})
    told(session, {6: (5,), 5: (1,)}, name="feature")
    if is_merged:
        told(session, {3: (2, 6)})
    for number in (1, 2, 5):
        measure(number)
    told(session, {3: (2, 6)})
    measure(3)

    assert (line(session), line(session, "feature")) == ([1, 2, 3], [1, 5])


def test_main_that_pulled_its_own_commits_keeps_them(session, measure):
    """Their first parents are those of a local commit; a branch was begun at one of them."""
    for number in (1, 2, 3):
        measure(number)
    told(session, {3: (2,), 2: (1,), 1: ()})
    told(session, {6: (2,)}, name="feature")
    told(session, {5: (4, 3), 4: (1,)})
    measure(5)

    assert line(session) == [1, 2, 3, 5]
    pairs = [(1, 5), (2, 5), (5, 1), (6, 5), (5, 5)]
    found = [queries.is_ancestor(session, sha(a), sha(b), "") for a, b in pairs]
    assert found == [True, True, False, False, False]


def test_branch_that_main_is_forwarded_to_becomes_main(session, measure):
    for number, branch in ((1, "main"), (5, "feature"), (6, "feature")):
        measure(number, branch=branch)

    told(session, {6: (5,), 5: (1,), 1: ()})

    assert line(session) == [1, 5, 6]


def test_merged_commits_of_an_unknown_branch_are_on_main(session, measure):
    for number in (1, 2, 5, 3):
        measure(number)

    told(session, {3: (2, 5), 2: (1,), 5: (1,), 1: ()})

    assert line(session) == [1, 2, 5, 3]

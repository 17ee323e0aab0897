from __future__ import annotations

from flexq_bench.db import queries
from flexq_bench.db.releases import store_releases


def test_releases_are_tags_of_stored_clean_commits(session, build, add):
    for order in (1, 2):
        add(f"{order}", commit=build.a_commit(order))
    add("dirty", m=2, commit=build.a_commit(3, dirty=True))
    tags = {"v1": build.a_commit(1).sha, "v2": build.a_commit(2).sha,
            "dirty": build.a_commit(3).sha, "never-measured": "f" * 40}  # fmt: skip

    assert store_releases(session, tags) == ["v1", "v2"]
    assert [(r.name, r.topo_order) for r in queries.releases(session)] == [("v2", 2), ("v1", 1)]


def test_moved_tag_is_updated_and_an_equal_one_changes_nothing(session, build, add):
    for order in (1, 2):
        add(f"{order}", commit=build.a_commit(order))
    store_releases(session, {"v1": build.a_commit(1).sha})

    assert store_releases(session, {"v1": build.a_commit(1).sha}) == []
    assert store_releases(session, {"v1": build.a_commit(2).sha}) == ["v1"]
    assert [r.sha for r in queries.releases(session)] == [build.a_commit(2).sha]

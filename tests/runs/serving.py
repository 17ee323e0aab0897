"""Helpers that serve requests, and simulate dying servers."""

from __future__ import annotations

import pytest

from flexq_bench.ci.requested_bisection import answered
from flexq_bench.db import queries
from flexq_bench.db.leases import REQUEST_LEASES
from flexq_bench.fleet.request_worker import serve_next


def served(database, pool, commit, on_record=lambda record: None, search=None):
    (kind,) = pool.kinds
    return serve_next(
        database, pool, kind, commit, "me", on_record=on_record, search=search or answered
    )


def dies(database, pool, commit):
    """A server is killed: nothing of it runs any more, and its lease runs out."""
    with pytest.raises(SystemExit):
        served(database, pool, commit)
    lapse(database)


def lapse(database):
    with database.session() as session:
        [row] = queries.requests(session, states=("running",))
        assert REQUEST_LEASES.renew(session, [row.server], until=row.created_at)

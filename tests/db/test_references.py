from __future__ import annotations

import pytest

from flexq_bench.db import queries
from flexq_bench.db.reference_store import ReferenceInfo, store_reference_values


def stated(m: int = 1, **changes) -> ReferenceInfo:
    fields = {"source": "Paper", "source_table": "Table 1", "kernel": "flexq-w6a6", "unit": "×"}
    return ReferenceInfo(**fields | {"metric": "speedup", "value": 1.5, "m": m} | changes)


def test_storing_the_same_values_twice_writes_nothing(session):
    values = [stated(1), stated(4)]

    assert store_reference_values(session, values) is True
    assert store_reference_values(session, values) is False
    assert queries.reference_values(session) == values


def test_corrected_value_replaces_the_old_one(session):
    store_reference_values(session, [stated(value=1.5), stated(4)])

    assert store_reference_values(session, [stated(value=1.6)]) is True

    assert [row.value for row in queries.reference_values(session)] == [1.6]


def test_duplicate_published_value_is_refused(session):
    with pytest.raises(ValueError, match="two published values"):
        store_reference_values(session, [stated(value=1.5), stated(value=1.6)])

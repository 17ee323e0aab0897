from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexq_bench.db import queries
from flexq_bench.db.exchange import read_records, write_records
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import (
    COMPARABLE_STATUSES,
    STATUSES,
    TIME_METRICS,
    CommitInfo,
    DeviceInfo,
    Record,
    RunInfo,
)
from flexq_bench.db.store import add_record

text = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
# Equal finite floats have equal bits, except zeros of different sign: SQLite has no negative zero,
# and no time, clock or error is negative.
number = st.floats(min_value=0, allow_infinity=False).filter(lambda x: str(x) != "-0.0")
amount = st.floats(0, 1e6).filter(lambda x: str(x) != "-0.0")  # within the ranges of db.ranges
count = st.integers(0, 2**40)
uuids = st.uuids().map(str)
time = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC)).map(
    datetime.isoformat
)
json_value = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
BY_TYPE = {
    str: text,
    int: count,
    float: amount,
    bool: st.booleans(),
    tuple[float, ...]: st.lists(amount, max_size=3).map(tuple),
    tuple[str, ...]: st.lists(text, unique=True, max_size=4).map(tuple),
    tuple[tuple[float, ...], ...]: st.lists(
        st.lists(amount, max_size=4).map(tuple), max_size=3
    ).map(tuple),
    dict[str, Any]: st.dictionaries(text, json_value, max_size=3),
    dict[str, str]: st.dictionaries(text, text, max_size=3),
}
BY_TYPE |= {kind | None: st.none() | strategy for kind, strategy in BY_TYPE.items()}
VERSION, BITS, SIZE = st.integers(0, 2**31 - 1), st.integers(0, 64), st.integers(1, 2**24)


def built(kind, **special):
    """Return a strategy for a dataclass: by the types of its fields, but for special ones."""
    by_field = {name: BY_TYPE.get(hint) for name, hint in get_type_hints(kind).items()}
    return st.builds(kind, **by_field | special)


commits = built(CommitInfo, sha=uuids, committed_at=st.none() | time, project=st.just(""))
devices = built(DeviceInfo)
runs = built(
    RunInfo,
    uuid=uuids,
    idempotency_key=uuids,
    created_at=time,
    status=st.sampled_from(["running", "complete"]),
)


@st.composite
def records(draw):
    record = draw(
        built(
            Record,
            uuid=uuids,
            status=st.sampled_from(STATUSES),
            direction=st.sampled_from(["lower", "higher"]),
            # more is required of a time
            metric=text.filter(lambda metric: metric not in TIME_METRICS.values()),
            created_at=time,
            run=runs,
            commit=commits,
            device=devices,
            **dict.fromkeys(("m", "n", "k"), SIZE),
            **dict.fromkeys(("weight_bits", "act_bits"), BITS),
            **dict.fromkeys(("kernel_version", "protocol_version"), VERSION),
            group=st.none() | SIZE,
            seed=st.integers(0, 2**63 - 1),
            schema_version=st.just(1),
            regime=st.none(),
            project=st.just(""),
        )
    )
    comparable = record.status in COMPARABLE_STATUSES and record.median_us is not None
    return replace(record, accepted=comparable and record.accepted)


quick = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@quick
@given(written=st.lists(records(), min_size=1, max_size=2))
def test_file_round_trip_is_exact(tmp_path, suffix, written):
    path = tmp_path / f"{uuid.uuid4()}{suffix}"

    assert write_records(path, written) == len(written)

    assert list(read_records(path)) == written


@quick
@given(record=records())
def test_database_round_trip_is_exact(session, record):
    add_record(session, record)

    stored = list(queries.stored_records(session, Record, Filters(runs=(record.run.uuid,))))
    session.rollback()

    assert stored == [record]

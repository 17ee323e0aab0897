from __future__ import annotations

import uuid
from datetime import UTC, datetime

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
word = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)
# Equal finite floats have equal bits, but for the sign of zero: SQLite keeps none, and no time,
# clock or error is negative.
number = st.floats(min_value=0, allow_infinity=False).filter(lambda x: str(x) != "-0.0")
whole = st.integers(-(2**63), 2**63 - 1)
size = st.integers(1, 2**24)
# Fields of these names are refused beyond (db.ranges).
amount = st.floats(0, 1e6).filter(lambda x: str(x) != "-0.0")
count = st.integers(0, 2**40)
WITHIN = {
    "kernel_version": st.integers(0, 2**31 - 1),
    "protocol_version": st.integers(0, 2**31 - 1),
    "weight_bits": st.integers(0, 64),
    "act_bits": st.integers(0, 64),
    "n_samples": count,
    "n_invalid": count,
    "seed": st.integers(0, 2**63 - 1),
}
time = st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1), timezones=st.just(UTC)).map(
    datetime.isoformat
)
json_value = st.recursive(
    st.none() | st.booleans() | whole | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def maybe(strategy):
    return st.none() | strategy


commits = st.builds(
    CommitInfo,
    sha=st.uuids().map(str),
    parent=maybe(word),
    topo_order=maybe(count),
    dirty=st.booleans(),
    subject=text,
    author=text,
    committed_at=maybe(time),
)
devices = st.builds(
    DeviceInfo,
    uuid=word,
    sku=text,
    backend=word,
    vbios=maybe(text),
    power_limit_w=maybe(amount),
    ecc=maybe(st.booleans()),
    mig=maybe(st.booleans()),
    memory_bytes=maybe(count),
    l2_bytes=maybe(count),
    sm_count=maybe(count),
    compute_capability=maybe(word),
)
runs = st.builds(
    RunInfo,
    uuid=st.uuids().map(str),
    suite=text,
    trigger=word,
    status=st.sampled_from(["running", "complete"]),
    created_at=time,
    idempotency_key=st.uuids().map(str),
    plan=st.lists(text, unique=True, max_size=4).map(tuple),
)
samples = st.lists(st.lists(amount, max_size=4).map(tuple), max_size=3).map(tuple)


@st.composite
def records(draw):
    fields = {
        "uuid": draw(st.uuids().map(str)),
        "status": draw(st.sampled_from(STATUSES)),
        "direction": draw(st.sampled_from(["lower", "higher"])),
        "created_at": draw(time),
        "placement_medians_us": tuple(draw(st.lists(amount, max_size=3))),
        "samples_us": draw(samples),
        "config": draw(st.dictionaries(text, json_value, max_size=3)),
        "extra": draw(st.dictionaries(text, json_value, max_size=3)),
        "environment": draw(st.dictionaries(text, text, max_size=3)),
        "run": draw(runs),
        "commit": draw(commits),
        "device": draw(devices),
        "exact": draw(maybe(st.booleans())),
        "binary_hash": draw(maybe(word)),
        "group": draw(maybe(size)),
        "throttle_mask": draw(maybe(count)),
        "schema_version": 1,
    }
    for name in ("m", "n", "k"):
        fields[name] = draw(size)
    for name, strategy in WITHIN.items():
        fields[name] = draw(strategy)
    for name in ("case", "kernel", "variant", "backend", "stage", "cache", "metric", "unit",
                 "input_distribution", "gpu", "model", "layer", "detail"):  # fmt: skip
        fields[name] = draw(text)
    for name in ("median_us", "ci_low_us", "ci_high_us", "floor_us", "pct_of_floor", "launch_us",
                 "tops", "max_rel_error", "sm_clock_mhz", "mem_clock_mhz", "power_w",
                 "temperature_c"):  # fmt: skip
        fields[name] = draw(maybe(amount))
    if fields["metric"] in TIME_METRICS.values():  # of which more is asked
        fields["metric"] += "-like"
    comparable = fields["status"] in COMPARABLE_STATUSES and fields["median_us"] is not None
    fields["accepted"] = comparable and draw(st.booleans())
    return Record(**fields)


quick = settings(
    max_examples=25,
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

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from flexq_bench.db import queries, schema
from flexq_bench.db.exchange import import_file, write_records
from flexq_bench.db.maintenance import compact, prune_samples, stats
from flexq_bench.db.records import Record
from flexq_bench.db.store import add_record


@pytest.fixture
def four(session, build):
    """Old and new, accepted and not; in this order."""
    records = [
        build.a_record(
            f"{created_at} {accepted}", accepted=accepted, created_at=f"{created_at}T00:00:00+00:00"
        )
        for created_at in ("2025-01-01", "2025-11-01")
        for accepted in (True, False)
    ]
    for record in records:
        add_record(session, record)
    return records


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"older_than": datetime(2025, 6, 1, tzinfo=UTC)}, [False, False, True, True]),
        ({"keep_accepted": True}, [True, False, True, False]),
        (
            {"older_than": datetime(2025, 6, 1, tzinfo=UTC), "keep_accepted": True},
            [True, False, True, True],
        ),
    ],
)
def test_prune_deletes_raw_samples_and_no_summary(session, four, options, left):
    pruned = prune_samples(session, **options)

    by_uuid = {record.uuid: record for record in queries.stored_records(session, Record)}
    assert pruned == left.count(False)
    assert [bool(by_uuid[record.uuid].samples_us) for record in four] == left
    assert {r.median_us for r in by_uuid.values()} == {6.1}
    assert prune_samples(session, **options) == 0


def test_prune_without_a_condition_is_refused(session, four):
    with pytest.raises(ValueError, match="needs an age"):
        prune_samples(session)
    assert stats(session).rows["sample"] == 4


def test_import_does_not_restore_pruned_samples(session, four, tmp_path):
    write_records(tmp_path / "r.jsonl", queries.stored_records(session, Record))
    prune_samples(session, keep_accepted=True)

    assert import_file(session, tmp_path / "r.jsonl").added == 0
    assert stats(session).rows["sample"] == 2


def test_stats_count_rows_and_bytes_and_name_the_revision(session, four):
    statistics = stats(session)

    assert (
        statistics.rows["measurement"],
        statistics.rows["series"],
        statistics.rows["alert"],
    ) == (4, 1, 0)
    assert statistics.revision == schema.revisions()[-1]
    assert statistics.size_bytes > 10_000


def test_compact_gives_the_space_of_pruned_samples_back(database, build):
    generator = random.Random(0)
    samples = tuple(generator.random() for _ in range(100_000))
    with database.session() as session:
        add_record(session, build.a_record(samples_us=(samples,)))
    with database.session() as session:
        full = stats(session).size_bytes
        prune_samples(session, older_than=datetime.now(UTC))

    compact(database)

    with database.session() as session:
        assert stats(session).size_bytes < full - 400_000

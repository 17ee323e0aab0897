from __future__ import annotations

from dataclasses import replace

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import RecordError
from flexq_bench.db.exchange import import_file, read_records, write_records
from flexq_bench.db.gate_store import add_gates
from flexq_bench.db.queries import Filters


def test_a_gate_record_comes_back_as_it_was(session, build):
    record = build.a_gate_record()
    assert add_gates(session, [record]) == 1
    assert list(queries.export_gates(session, Filters())) == [record]


def test_storing_it_twice_changes_nothing(session, build):
    record = build.a_gate_record()
    add_gates(session, [record])
    assert add_gates(session, [record]) == 0
    assert len(queries.gate_history(session, record.model, limit=9)) == 1


def test_an_outcome_that_does_not_exist_is_refused(session, build):
    limit = replace(build.a_gate_record().limits[0], outcome="fine")
    with pytest.raises(RecordError, match="limits: outcome is 'fine', not one of missing"):
        add_gates(session, [build.a_gate_record(limits=(limit,))])


def test_a_file_gives_it_back_and_is_imported_once(session, build, tmp_path):
    path = tmp_path / "both.jsonl"
    records = [build.an_accuracy_record(), build.a_gate_record()]
    assert write_records(path, records) == 2
    assert list(read_records(path)) == records

    assert import_file(session, path).added == 2
    assert import_file(session, path).added == 0
    assert list(queries.export_gates(session, Filters())) == records[1:]


@pytest.mark.parametrize(
    ("filters", "passing"),
    [
        (Filters(suites=("accuracy",)), 1),
        (Filters(models=("other",)), 0),
        (Filters(gpus=("B200",)), 0),
        (Filters(kernels=("flexq",)), 0),
    ],
)
def test_a_filter_narrows_what_is_exported(session, build, filters, passing):
    add_gates(session, [build.a_gate_record()])
    assert len(list(queries.export_gates(session, filters))) == passing


def test_the_history_has_the_newest_first_and_ends_at_the_limit(session, build):
    times = [f"2025-11-2{day}T10:00:00+00:00" for day in (2, 4, 3)]
    add_gates(session, [build.a_gate_record(at, created_at=at) for at in times])
    add_gates(session, [build.a_gate_record("other", model="other")])

    found = queries.gate_history(session, "tiny-llama", limit=2)

    assert [row.created_at.isoformat() for row in found] == sorted(times, reverse=True)[:2]
    assert found[0].limits[0].low == 0.3

from __future__ import annotations

import json

import pytest

from flexq_bench.db import queries
from flexq_bench.db.accuracy_store import add_accuracy
from flexq_bench.db.errors import RecordError, RecordFormatError
from flexq_bench.db.exchange import import_file, read_records, write_records
from flexq_bench.db.queries import Filters
from flexq_bench.db.store import add_record


def test_an_accuracy_record_comes_back_as_it_was(session, build):
    records = [build.an_accuracy_record(), build.an_accuracy_record("no values", values=())]
    assert add_accuracy(session, records) == 2
    found = sorted(queries.accuracy_results(session), key=lambda record: len(record.values))
    assert found == records[::-1]


def test_storing_it_twice_changes_nothing(session, build):
    record = build.an_accuracy_record()
    add_accuracy(session, [record])
    assert add_accuracy(session, [record]) == 0
    assert list(queries.accuracy_results(session)) == [record]


def test_a_value_that_is_not_finite_is_refused(session, build):
    with pytest.raises(RecordError, match="value is nan"):
        add_accuracy(session, [build.an_accuracy_record(value=float("nan"))])


def test_each_argument_narrows(session, build):
    a, b = build.a_run("a", suite="accuracy"), build.a_run("b", suite="gate")
    records = [
        build.an_accuracy_record(run=a, model="one"),
        build.an_accuracy_record(run=b, model="two", device=build.a_device(uuid="2", sku="B200")),
    ]
    add_accuracy(session, records)
    for narrowed in (
        {"runs": [b.uuid]},
        {"suites": ["gate"]},
        {"models": ["two"]},
        {"gpus": ["B200"]},
    ):
        assert list(queries.accuracy_results(session, **narrowed)) == records[1:]


def test_a_filter_that_accuracy_results_do_not_have_lets_none_through(session, build):
    add_accuracy(session, [build.an_accuracy_record()])
    assert list(queries.export_accuracy(session, Filters(kernels=("flexq-w6a6",)))) == []
    assert len(list(queries.export_accuracy(session, Filters(suites=("accuracy",))))) == 1


def test_a_file_holds_both_kinds_and_gives_both_back(session, build, tmp_path):
    path = tmp_path / "both.jsonl"
    records = [build.a_record(), build.an_accuracy_record()]
    assert write_records(path, records) == 2
    assert list(read_records(path)) == records

    summary = import_file(session, path)
    assert (summary.read, summary.added) == (2, 2)
    assert import_file(session, path).added == 0
    assert list(queries.accuracy_results(session)) == records[1:]


def test_parquet_holds_measurements_only(build, tmp_path):
    with pytest.raises(RecordError, match=r"measurements only: use \.jsonl"):
        write_records(tmp_path / "some.parquet", [build.an_accuracy_record()])


def test_a_kind_of_a_later_version_is_refused(build, tmp_path):
    path = tmp_path / "later.jsonl"
    write_records(path, [build.an_accuracy_record()])
    path.write_text(path.read_text().replace('"kind":"accuracy"', '"kind":"taste"'))
    with pytest.raises(RecordFormatError, match="kind is 'taste', not one of accuracy"):
        list(read_records(path))


def test_a_run_may_have_both_kinds(session, build):
    run = build.a_run(suite="accuracy")
    add_record(session, build.a_record(run=run))
    add_accuracy(session, [build.an_accuracy_record(run=run)])
    assert len(list(queries.run_records(session, run.uuid))) == 1
    assert len(list(queries.accuracy_results(session, runs=[run.uuid]))) == 1


def test_a_record_says_which_checkpoint_it_is_of_and_what_computed_it(session, build, tmp_path):
    of_checkpoint = {"content_hash": "0a" * 32, "scheme_version": 2}
    records = [
        build.an_accuracy_record("r", through="reference", **of_checkpoint),
        build.an_accuracy_record("k", through="kernels", **of_checkpoint),
    ]
    path = tmp_path / "both.jsonl"
    write_records(path, records)
    import_file(session, path)
    stored = {record.through: record for record in queries.accuracy_results(session)}
    assert stored == {record.through: record for record in records}


def test_records_from_before_checkpoints_are_of_the_reference(session, build, tmp_path):
    path = tmp_path / "old.jsonl"
    write_records(path, [build.an_accuracy_record()])
    row = json.loads(path.read_text())
    for later in ("through", "content_hash", "scheme_version"):
        del row[later]
    path.write_text(json.dumps(row) + "\n")
    import_file(session, path)
    (stored,) = queries.accuracy_results(session)
    assert (stored.through, stored.content_hash, stored.scheme_version) == ("reference", None, None)


def test_another_way_to_compute_is_refused(session, build):
    with pytest.raises(RecordError, match="through is 'magic', not one of reference, kernels"):
        add_accuracy(session, [build.an_accuracy_record(through="magic")])

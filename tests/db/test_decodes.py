from __future__ import annotations

import pytest

from db import queries
from db.decode_store import add_decodes
from db.errors import RecordError
from db.exchange import import_file, read_records, write_records
from db.queries import Filters


def test_decode_and_serving_records_come_back_as_they_were(session, build):
    decode, serving = build.a_decode_record(), build.a_serving_record()
    assert add_decodes(session, [decode, serving]) == 2
    assert list(queries.decode_results(session)) == [decode]
    assert list(queries.serving_results(session)) == [serving]


def test_one_that_was_refused_has_no_times(session, build):
    nothing = dict.fromkeys(("prefill_ms", "token_ms", "tokens_per_s", "weights_bytes"))
    record = build.a_decode_record(status="refused", detail="too large", parts=(), **nothing)
    add_decodes(session, [record])
    assert list(queries.decode_results(session)) == [record]


def test_storing_them_twice_changes_nothing(session, build):
    records = [build.a_decode_record(), build.a_serving_record()]
    add_decodes(session, records)
    assert add_decodes(session, records) == 0


def test_an_unknown_status_is_refused(session, build):
    with pytest.raises(RecordError, match="status is 'fast', not one of ok, refused, failed"):
        add_decodes(session, [build.a_decode_record(status="fast")])


def test_each_argument_narrows(session, build):
    a, b = build.a_run("a", suite="decode"), build.a_run("b", suite="night")
    device = build.a_device(uuid="2", sku="B200")
    records = [
        build.a_decode_record(run=a, model="one"),
        build.a_decode_record(run=b, model="two", device=device),
    ]
    add_decodes(session, records)
    for narrowed in (
        {"runs": [b.uuid]},
        {"suites": ["night"]},
        {"models": ["two"]},
        {"gpus": ["B200"]},
    ):
        assert list(queries.decode_results(session, **narrowed)) == records[1:]


def test_a_file_gives_all_kinds_back(session, build, tmp_path):
    path = tmp_path / "all.jsonl"
    records = [build.a_record(), build.a_decode_record(), build.a_serving_record()]
    write_records(path, records)
    assert list(read_records(path)) == records

    assert import_file(session, path).added == 3
    assert import_file(session, path).added == 0
    assert list(queries.export_decodes(session, Filters(models=("tiny-llama",)))) == records[1:]
    assert list(queries.export_decodes(session, Filters(kernels=("flexq",)))) == []

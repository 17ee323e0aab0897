from __future__ import annotations

import json

import pytest

from flexq_bench.db import queries
from flexq_bench.db.decode_records import ProcessDecode
from flexq_bench.db.decode_store import add_decodes
from flexq_bench.db.errors import RecordError, RecordFormatError
from flexq_bench.db.exchange import import_file, read_records, write_records
from flexq_bench.db.queries import Filters


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


def test_a_newer_record_of_the_same_case_takes_its_place_and_an_older_one_changes_nothing(
    session, build
):
    def processes(count):
        return tuple(
            ProcessDecode(number, "GPU-1", 9.5, (2.75, 2.5 + number), 11 << 30, None, 40.5)
            for number in range(count)
        )

    first = build.a_decode_record(processes=processes(1), created_at="2025-11-21T10:00:05+00:00")
    later = build.a_decode_record(
        processes=processes(2), token_ms=2.7, created_at="2025-11-21T10:01:05+00:00"
    )
    assert add_decodes(session, [first]) == 1
    assert add_decodes(session, [later]) == 1
    assert list(queries.decode_results(session)) == [later]

    assert add_decodes(session, [first, later]) == 0
    assert list(queries.decode_results(session)) == [later]


def test_a_file_keeps_what_each_process_measured(build, tmp_path):
    process = ProcessDecode(0, "GPU-1", 9.5, (2.75, 1 / 3), None, None, None)
    records = [build.a_decode_record(processes=(process,))]
    write_records(tmp_path / "decode.jsonl.gz", records)

    assert list(read_records(tmp_path / "decode.jsonl.gz")) == records


def test_a_file_from_before_a_field_was_added_is_read(build, tmp_path):
    path = tmp_path / "old.jsonl"
    write_records(path, [build.a_decode_record(), build.a_serving_record()])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for later in ("processes", "ttft_p50_ms", "ttft_p95_ms"):
            line.pop(later, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    decode, serving = read_records(path)
    assert (decode.processes, serving.ttft_p50_ms) == ((), None)

    del lines[0]["batch"]
    path.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(RecordFormatError, match="batch is missing"):
        list(read_records(path))

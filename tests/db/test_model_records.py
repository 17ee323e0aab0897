"""Records of whole models: accuracy, decodes, servings and decisions of accuracy gates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flexq_bench.db import queries
from flexq_bench.db.errors import RecordError, RecordFormatError
from flexq_bench.db.exchange import import_file, read_records, write_records
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import (
    AccuracyRecord,
    DecodeRecord,
    GateLimit,
    GateRecord,
    ProcessDecode,
    Record,
    ServingRecord,
)
from flexq_bench.db.store import add_records

PROCESS = ProcessDecode(0, "GPU-1", 9.5, (2.75, 1 / 3), 11 << 30, None, 40.5)
CPU_PROCESS = ProcessDecode(1, "CPU-1", 9.5, (), None, None, None)
LIMIT = GateLimit("parity", "0.001", "fine", "", None, None, None, None, None, "")
UNTIMED = dict.fromkeys(("prefill_ms", "token_ms", "tokens_per_s", "weights_bytes"))
CHECKPOINT = {"content_hash": "0a" * 32, "scheme_version": 2}


@pytest.fixture
def records(build):
    """Records by kind, all of one run with a measurement."""
    run = build.a_run(suite="accuracy")
    return {
        Record: [build.a_record(run=run)],
        AccuracyRecord: [
            build.an_accuracy_record(run=run),
            build.an_accuracy_record("no values", run=run, values=(), through="kernels"),
            build.an_accuracy_record("checkpoint", run=run, **CHECKPOINT),
        ],
        DecodeRecord: [
            build.a_decode_record(run=run),
            build.a_decode_record("processes", run=run, processes=(PROCESS, CPU_PROCESS)),
            build.a_decode_record(
                "refused", run=run, status="refused", detail="too large", parts=(), **UNTIMED
            ),
        ],
        ServingRecord: [build.a_serving_record(run=run)],
        GateRecord: [
            build.a_gate_record(run=run),
            build.a_gate_record("diagnosis", run=run, limits=(), diagnosis={"layers": [1]}),
        ],
    }


def stored(session, kind, **filters):
    return list(queries.stored_records(session, kind, Filters(**filters)))


def by_uuid(records):
    return sorted(records, key=lambda record: record.uuid)


def test_records_are_stored_once_and_equal_the_given_ones(session, records):
    for kind, given in records.items():
        assert [add_records(session, given) for _ in range(2)] == [len(given), 0]
        assert stored(session, kind) == by_uuid(given)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_file_of_all_kinds_is_read_and_imported_once(session, records, tmp_path, suffix):
    path = tmp_path / f"all{suffix}"
    given = [record for of_kind in records.values() for record in of_kind]
    assert write_records(path, given) == len(given)
    assert list(read_records(path)) == given

    assert import_file(session, path).added == len(given)
    assert import_file(session, path).added == 0
    for kind, of_kind in records.items():
        assert stored(session, kind) == by_uuid(of_kind)


def test_filters_select_records(session, build):
    other_run, device = build.a_run("b", suite="other"), build.a_device(uuid="2", sku="B200")
    for builder, kind in (
        (build.an_accuracy_record, AccuracyRecord),
        (build.a_decode_record, DecodeRecord),
        (build.a_serving_record, ServingRecord),
        (build.a_gate_record, GateRecord),
    ):
        other = builder(run=other_run, model="other", device=device)
        add_records(session, [builder(), other])
        for filters in (
            {"runs": (other_run.uuid,)},
            {"suites": ("other",)},
            {"models": ("other",)},
            {"gpus": ("B200",)},
        ):
            assert stored(session, kind, **filters) == [other]
        assert stored(session, kind, kernels=("flexq-w6a6",)) == []  # not a filter on models


@pytest.mark.parametrize(
    ("builder", "changes", "message"),
    [
        ("an_accuracy_record", {"value": float("nan")}, "value is nan"),
        ("an_accuracy_record", {"through": "magic"}, "through is 'magic', not one of reference"),
        ("a_decode_record", {"status": "fast"}, "status is 'fast', not one of ok, refused, failed"),
        ("a_gate_record", {"verdict": "fine"}, "verdict is 'fine', not one of missing"),
        ("a_gate_record", {"limits": (LIMIT,)}, "limits: outcome is 'fine', not one of missing"),
    ],
)
def test_invalid_value_is_refused(session, build, builder, changes, message):
    with pytest.raises(RecordError, match=message):
        add_records(session, [getattr(build, builder)(**changes)])


def test_parquet_refuses_records_of_models(build, tmp_path):
    with pytest.raises(RecordError, match=r"measurements only: use \.jsonl"):
        write_records(tmp_path / "some.parquet", [build.an_accuracy_record()])


def test_kind_of_a_later_version_is_refused(build, tmp_path):
    path = tmp_path / "later.jsonl"
    write_records(path, [build.an_accuracy_record()])
    path.write_text(path.read_text().replace('"kind":"accuracy"', '"kind":"taste"'))
    with pytest.raises(RecordFormatError, match="kind is 'taste', not one of accuracy"):
        list(read_records(path))


def test_file_from_before_a_field_was_added_is_read(build, tmp_path):
    path = tmp_path / "old.jsonl"
    write_records(
        path, [build.an_accuracy_record(), build.a_decode_record(), build.a_serving_record()]
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    added_later = ("through", "content_hash", "scheme_version", "processes", "ttft_p50_ms")
    for line in lines:
        for name in added_later:
            line.pop(name, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    accuracy, decode, serving = read_records(path)
    assert (accuracy.through, accuracy.content_hash) == ("reference", None)
    assert (decode.scheme_version, decode.processes, serving.ttft_p50_ms) == (None, (), None)

    del lines[1]["batch"]
    path.write_text(json.dumps(lines[1]) + "\n")
    with pytest.raises(RecordFormatError, match="batch is missing"):
        list(read_records(path))


def test_newer_record_of_a_decode_replaces_the_older_one(session, build):
    older = build.a_decode_record(processes=(PROCESS, CPU_PROCESS))
    newer = replace(
        older, processes=(PROCESS,), token_ms=2.7, created_at="2025-11-21T10:01:05+00:00"
    )
    assert add_records(session, [older]) == 1
    assert add_records(session, [newer]) == 1
    assert stored(session, DecodeRecord) == [newer]

    assert add_records(session, [older, newer]) == 0
    assert stored(session, DecodeRecord) == [newer]


def test_gate_history_has_the_newest_first(session, build):
    times = [f"2025-11-2{day}T10:00:00+00:00" for day in (2, 4, 3)]
    add_records(session, [build.a_gate_record(time, created_at=time) for time in times])
    add_records(session, [build.a_gate_record("other", model="other")])

    history = queries.gate_history(session, "tiny-llama", limit=2)

    assert [row.created_at.isoformat() for row in history] == sorted(times, reverse=True)[:2]
    assert history[0].limits[0].low == 0.3

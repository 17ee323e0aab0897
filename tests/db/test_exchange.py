from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from datetime import datetime, timedelta
from itertools import permutations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import event

from flexq_bench.db import exchange, jsonlines, queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.errors import (
    ConflictError,
    DatabaseError,
    RecordError,
    RecordFormatError,
    ResultsFileError,
)
from flexq_bench.db.exchange import (
    import_file,
    import_in_parts,
    read_records,
    record_line,
    write_records,
)
from flexq_bench.db.maintenance import stats
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import Record
from flexq_bench.db.store import add_record, begin_run

# What other programs rely on; fmt keeps it from filling a page.
# fmt: off
FLAT = {
    "kernel", "variant", "backend", "stage", "cache", "model", "layer", "m", "n", "k", "gpu",
    "status", "median_us", "ci_low_us", "ci_high_us", "n_samples", "floor_us", "pct_of_floor",
    "tops", "max_rel_error", "exact", "config", "commit", "run", "created_at", "schema_version",
}
# fmt: on
SUFFIXES = [".jsonl", ".jsonl.gz", ".parquet"]


@pytest.fixture
def three(build):
    run = build.a_run(plan=("b", "a"))
    return [build.a_record(m=m, run=run, samples_us=((0.1 * m, 1e-9),)) for m in (1, 2, 4)]


def test_json_line_has_flat_names_and_complete_infos(build):
    record = build.a_record()

    flat = json.loads(record_line(record))

    assert flat.keys() >= FLAT
    assert (flat["commit"], flat["run"]) == (record.commit.sha, record.run.uuid)
    assert flat["commit_info"]["topo_order"] == 1
    assert flat["run_info"]["suite"] == "smoke"
    assert flat["device_info"]["sku"] == "NVIDIA H200"
    assert flat["environment"] == {"driver": "580.1", "torch": "2.13.0"}


def test_parquet_columns_are_flat_names_and_lists_of_samples(tmp_path, three):
    write_records(tmp_path / "r.parquet", three)

    table = pq.read_table(tmp_path / "r.parquet")

    assert set(table.column_names) >= FLAT
    assert table["commit"].to_pylist() == [r.commit.sha for r in three]
    assert str(table.schema.field("samples_us").type) == ("list<element: list<element: double>>")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_importing_twice_changes_nothing(session, tmp_path, three, suffix):
    path = tmp_path / f"r{suffix}"
    write_records(path, three)

    first = import_file(session, path)
    stored = list(queries.stored_records(session, Record))
    second = import_file(session, path)

    assert (first.read, first.added, first.runs) == (3, 3, (three[0].run.uuid,))
    assert (second.read, second.added) == (3, 0)
    assert list(queries.stored_records(session, Record)) == stored


@pytest.mark.parametrize("order", list(permutations(("running", "interrupted", "complete"))))
def test_run_status_advances_whatever_the_order_of_imports(session, tmp_path, build, order):
    for m, status in enumerate(order, start=1):
        record = build.a_record(m=m, run=build.a_run(status=status))
        write_records(tmp_path / "r.jsonl", [record])
        import_file(session, tmp_path / "r.jsonl")

    assert {record.run.status for record in queries.stored_records(session, Record)} == {"complete"}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_export_import_export_is_the_same_file(make_url, tmp_path, build, suffix):
    later = build.a_run("a later one", created_at="2025-11-22T00:00:00+00:00", status="running")
    records = [
        build.a_record("x", run=later),
        build.a_record("late", m=8, created_at="2025-11-21T11:00:00+00:00"),
        build.a_record("early", m=16, environment={"z": "1", "a": "2"}),
        build.a_record("dirty", m=2, commit=build.a_commit(3, dirty=True), config={"z": 1, "a": 2}),
    ]
    first, second, unchecked = (tmp_path / f"{name}{suffix}" for name in ("1", "2", "3"))
    write_records(tmp_path / "given.jsonl", records)
    with open_database(make_url()) as database, database.session() as session:
        import_file(session, tmp_path / "given.jsonl")
        write_records(first, queries.stored_records(session, Record))

    with open_database(make_url()) as database, database.session() as session:
        import_file(session, first)
        write_records(second, queries.stored_records(session, Record))
        write_records(unchecked, queries.stored_records(session, Record), stored=True)

    assert first.read_bytes() == second.read_bytes() == unchecked.read_bytes()


@pytest.mark.parametrize("batch", [1, 2, 500])
def test_export_order_is_independent_of_the_order_of_insertion(make_url, build, monkeypatch, batch):
    monkeypatch.setattr(queries.records, "_BATCH", batch)
    late = build.a_record("late", created_at="2025-11-21T11:00:00+00:00")
    early = build.a_record("early")
    older = build.a_record(run=build.a_run("older", created_at="2025-11-20T00:00:00+00:00"))
    for arriving in ([late, early, older], [older, early, late], [early, late, older]):
        with open_database(make_url()) as database, database.session() as session:
            for record in arriving:
                add_record(session, record)
            assert list(queries.stored_records(session, Record)) == [older, early, late]


def test_export_is_filtered_by_run_kernel_and_time(session, tmp_path, build):
    other = build.a_run("other")
    records = [
        build.a_record(),
        build.a_record(run=other),
        build.a_record(kernel="abq-w6a6"),
        build.a_record("new", created_at="2025-12-01T00:00:00+00:00"),
    ]
    write_records(tmp_path / "r.jsonl", records)
    import_file(session, tmp_path / "r.jsonl")

    def exported(**filters):
        return list(queries.stored_records(session, Record, Filters(**filters)))

    assert exported(runs=(other.uuid,)) == [records[1]]
    assert exported(kernels=("abq-w6a6",)) == [records[2]]
    oldest = datetime.fromisoformat(records[0].created_at)
    assert len(exported(since=oldest)) == 4
    assert exported(since=oldest + timedelta(days=5)) == [records[3]]
    assert len(exported(until=oldest)) == 3
    assert exported(m=(3,)) == []


@pytest.mark.parametrize("value", [0, -3.0])
def test_metric_other_than_time_may_be_zero_or_negative(session, tmp_path, build, value):
    flat = json.loads(record_line(build.a_record())) | {
        "metric": "spill_bytes", "unit": "bytes", "median_us": value, "floor_us": None,
    }  # fmt: skip
    (tmp_path / "r.jsonl").write_text(json.dumps(flat) + "\n")

    assert import_file(session, tmp_path / "r.jsonl").added == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("value", [40.0, None])
def test_value_of_another_unit_is_no_time_in_files(tmp_path, build, suffix, value):
    other = {"metric": "registers", "unit": "registers", "accepted": value is not None}
    times = {"floor_us": None, "ci_low_us": None, "ci_high_us": None}
    records = [build.a_record("a"), build.a_record("b", median_us=value, **other, **times)]

    write_records(tmp_path / f"r{suffix}", records)

    assert list(read_records(tmp_path / f"r{suffix}")) == records
    flat = json.loads(record_line(records[1]))
    assert flat["value"] == value
    assert "median_us" not in flat


def test_import_on_a_full_disk_stores_nothing(tmp_path, build):
    records = [build.a_record(str(i), case=str(i), detail="x" * 1000) for i in range(500)]
    write_records(tmp_path / "r.jsonl", records)
    with open_database(str(tmp_path / "db.sqlite")) as database:
        event.listen(
            database.engine,
            "begin",
            lambda connection: connection.exec_driver_sql("PRAGMA max_page_count = 150"),
        )
        full = pytest.raises(DatabaseError, match="the disk is full: free space")
        with full, database.session() as session:
            import_file(session, tmp_path / "r.jsonl")

        with database.session() as session:
            assert stats(session).rows["measurement"] == 0


def test_blank_lines_are_skipped(session, tmp_path, three):
    path = tmp_path / "r.jsonl"
    path.write_text("\n" + "\n\r\n".join(map(record_line, three)) + "\n\n")

    assert import_file(session, path).read == 3

    path.write_text("\n\n")
    with pytest.raises(RecordFormatError, match="the file is empty"):
        import_file(session, path)


@pytest.fixture
def stored_at_once(monkeypatch):
    """The good records of a file reach the database before its bad one is read."""
    monkeypatch.setattr("flexq_bench.db.writer._BATCH", 1)


@pytest.mark.usefixtures("stored_at_once")
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.97])
def test_truncated_file_is_refused_as_a_whole(session, tmp_path, build, three, suffix, kept):
    path = tmp_path / f"r{suffix}"
    write_records(tmp_path / "before.jsonl", [build.a_record("before")])
    import_file(session, tmp_path / "before.jsonl")
    write_records(path, three)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])

    with pytest.raises(RecordFormatError, match=f"{path.name}.*(cut off|empty).*: copy"):
        import_file(session, path)

    assert [r.uuid for r in queries.stored_records(session, Record)] == [
        build.a_record("before").uuid
    ]


@pytest.mark.usefixtures("stored_at_once")
def test_invalid_line_is_named_and_its_file_is_not_stored(session, tmp_path, three):
    path = tmp_path / "r.jsonl"
    flat = json.loads(record_line(three[2]))
    del flat["kernel"]
    path.write_text("\n".join([*map(record_line, three[:2]), json.dumps(flat), ""]))

    with pytest.raises(RecordFormatError, match=r"r\.jsonl:3: kernel is missing"):
        import_file(session, path)

    assert set(stats(session).rows.values()) == {0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2, this version reads 1"),
        ({"schema_version": None}, "no schema_version: this is not a FlexQ Bench result"),
        ({"colour": "red"}, "unknown field 'colour'"),
        ({"median_us": "fast"}, "median_us must be a number, got 'fast'"),
        ({"median_us": float("nan")}, "NaN is no JSON number"),
        ({"median_us": True}, "median_us must be a number, got True"),
        ({"samples_us": [1.0]}, "samples_us must be a list, got 1.0"),
        ({"commit": "another"}, "commit is not the sha in commit_info"),
        ({"run_info": None}, "run_info is missing"),
        ({"device_info": {"uuid": "x"}}, "device: .* is missing"),
        ({"run_info": {"uuid": "r", "status": "done"}, "run": "r"}, "run: created_at is missing"),
        ({"median_us": 0}, "median_us is 0.0: a time is above 0"),
        ({"ci_low_us": -1.5}, "ci_low_us is -1.5: a time is above 0"),
        ({"floor_us": -0.0}, "floor_us is -0.0"),
        ({"median_us": 10**400}, "median_us is inf"),
        ({"median_us": None}, "accepted is true, and median_us is null"),
        ({"status": "failed"}, "accepted is true, and status is 'failed'"),
        ({"status": "incorrect"}, "accepted is true, and status is 'incorrect'"),
        ({"median_us": 1e300}, "median_us is 1e.300, out of range"),
        ({"samples_us": [[1.0, -2.0]]}, "samples_us is -2.0, out of range"),
        ({"weight_bits": -6}, "weight_bits is -6, out of range"),
        ({"act_bits": 65}, "act_bits is 65, out of range"),
        ({"n_samples": -1}, "n_samples is -1, out of range"),
        ({"group": 0}, "group is 0, out of range"),
        ({"seed": -1}, "seed is -1, out of range"),
        ({"protocol_version": -1}, "protocol_version is -1, out of range"),
        ({"kernel_version": -1}, "kernel_version is -1, out of range"),
        ({"pct_of_floor": -5.0}, "pct_of_floor is -5.0, out of range"),
        ({"max_rel_error": -0.1}, "max_rel_error is -0.1, out of range"),
        ({"ci_low_us": 9.0, "ci_high_us": 8.0}, "ci_low_us is 9.0 and ci_high_us is 8.0"),
        ({"detail": "a" * 70_000}, "detail has 70,000 letters, 65,536 are the most"),
        ({"extra": {"a": [{"b": "c" * 70_000}]}}, "b has 70,000 letters"),
    ],
)
def test_line_that_is_no_record_is_refused_with_its_reason(tmp_path, build, change, message):
    path = tmp_path / "r.jsonl"
    flat = json.loads(record_line(build.a_record())) | change
    path.write_text(json.dumps(flat) + "\n")

    with pytest.raises(RecordFormatError, match=rf"r\.jsonl:1: {message}"):
        list(read_records(path))


@pytest.mark.parametrize("content", ["hello\n", "[1]\n", '{"a": 1}\n', "7\n", "[" * 100_000 + "\n"])
def test_file_of_another_program_is_refused(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_text(content)

    with pytest.raises(RecordFormatError, match=r"r\.jsonl:1: .*not a .*FlexQ Bench result"):
        list(read_records(path))


@pytest.mark.parametrize("opened", [open, gzip.open], ids=["plain", "gzip"])
def test_endless_line_is_refused_without_reading_it(tmp_path, monkeypatch, opened):
    monkeypatch.setattr(jsonlines, "MAX_LINE_BYTES", 1000)
    path = tmp_path / ("a.jsonl.gz" if opened is gzip.open else "a.jsonl")
    with opened(path, "wb") as file:
        file.write(b"\n" + b" " * 10_000_000)
    tracemalloc.start()
    with pytest.raises(RecordFormatError, match=r":2: a line of over 1,000 bytes"):
        list(read_records(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 1_000_000


def test_line_of_too_many_values_is_refused_before_parsing(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"extra": [' + b"[]," * 700_000 + b"0]}\n")
    tracemalloc.start()
    with pytest.raises(RecordFormatError, match=r":1: a line of over 1,310,720 values"):
        list(read_records(path))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert most < 10 << 20


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"\n", "over 1,000 blank lines"), (b" " * 1000 + b"\n", "expands to more than 100,000")],
)
def test_gzip_file_that_expands_without_end_is_refused(tmp_path, three, monkeypatch, line, message):
    monkeypatch.setattr(jsonlines, "_MIN_BOUNDED_BYTES", 100_000)
    monkeypatch.setattr(jsonlines, "MAX_EXPANSION", 1)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(record_line(three[0]).encode() + b"\n")
        file.writelines([line] * 2000)

    with pytest.raises(RecordFormatError, match=message):
        list(read_records(path))


@pytest.mark.parametrize("grown", ["detail", "samples_us", "extra"])
def test_parquet_file_that_expands_is_refused(tmp_path, three, monkeypatch, grown):
    monkeypatch.setattr("flexq_bench.db.parquet.MAX_LINE_BYTES", 100_000)
    monkeypatch.setattr("flexq_bench.db.parquet.MAX_CELLS", 10_000)
    path = tmp_path / "r.parquet"
    write_records(path, three)
    first = pq.read_table(path).slice(0, 1)
    table = pa.concat_tables([first] * 1000).combine_chunks()
    large = {
        "detail": "x" * 200_000,
        "samples_us": [[1.5] * 11_000],
        "extra": json.dumps({"a": [0] * 12_000}),
    }[grown]
    index = table.schema.get_field_index(grown)
    one = pa.array([large], type=table.schema.field(grown).type)
    column = pa.concat_arrays([table[grown].combine_chunks().slice(0, 999), one])
    table = table.set_column(index, table.schema.field(grown), column)
    pq.write_table(table, path, compression="zstd")

    with pytest.raises(RecordFormatError, match=r"r.parquet:1000: a (row|cell) of over"):
        list(read_records(path))


def test_row_group_of_too_many_values_is_refused(tmp_path, three, monkeypatch):
    monkeypatch.setattr("flexq_bench.db.parquet._MAX_GROUP_VALUES", 2)
    write_records(tmp_path / "r.parquet", three)

    with pytest.raises(RecordFormatError, match="values in a row group, 2 are the most"):
        list(read_records(tmp_path / "r.parquet"))


def test_large_rows_of_parquet_are_read_in_parts(tmp_path, three, monkeypatch):
    write_records(tmp_path / "r.parquet", three)
    whole = list(read_records(tmp_path / "r.parquet"))
    monkeypatch.setattr("flexq_bench.db.parquet.MAX_LINE_BYTES", 12_000)

    assert list(read_records(tmp_path / "r.parquet")) == whole == three


def test_file_is_read_before_the_database_is_locked(tmp_path, three, monkeypatch):
    write_records(tmp_path / "r.jsonl", three)
    url, added = str(tmp_path / "d.sqlite"), []
    reads = exchange.read_records

    def slowly(path):
        for record in reads(path):
            if not added:  # another writer, while the file is read
                with open_database(url, busy_timeout_s=0.1) as other, other.session() as writing:
                    begin_run(writing, three[0].run, three[0].commit)
                added.append(1)
            yield record

    monkeypatch.setattr(exchange, "read_records", slowly)
    with open_database(url) as database, database.session() as session:
        assert import_file(session, tmp_path / "r.jsonl").added == 3


def test_parquet_file_of_another_program_or_version_is_refused(tmp_path, three):
    path = tmp_path / "r.parquet"
    write_records(path, three)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({}), path)
    with pytest.raises(RecordFormatError, match="not a Parquet file of FlexQ Bench results"):
        list(read_records(path))

    newer = {"flexq_bench.schema_version": "2"}
    pq.write_table(table.replace_schema_metadata(newer), path)
    with pytest.raises(RecordFormatError, match="schema_version is 2, this version reads 1"):
        list(read_records(path))

    path.write_text("hello")
    with pytest.raises(RecordFormatError, match="cut off or damaged"):
        list(read_records(path))


def test_damaged_file_is_reported_in_one_line(tmp_path, three):
    for suffix in (".parquet", ".jsonl.gz"):
        path = tmp_path / f"r{suffix}"
        write_records(path, three)
        content = bytearray(path.read_bytes())
        content[40:90] = bytes(50)
        path.write_bytes(content)
        with pytest.raises(RecordFormatError, match="cut off or damaged") as caught:
            list(read_records(path))
        assert "\n" not in str(caught.value)


def test_flipped_bit_of_a_sample_is_detected(tmp_path, three):
    path = tmp_path / "r.parquet"
    write_records(path, three)
    content, end = path.read_bytes(), pq.ParquetFile(path).metadata.row_group(0).column(0)
    drawn, refused = random.Random(3), 0
    first = end.dictionary_page_offset or end.data_page_offset
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for _ in range(40):
        at = drawn.randrange(first, footer)
        flipped = bytearray(content)
        flipped[at] ^= 1 << drawn.randrange(8)
        path.write_bytes(flipped)
        try:
            assert list(read_records(path)) == three
        except RecordFormatError:
            refused += 1
    assert refused > 20


def test_first_of_two_records_with_one_uuid_is_kept(session, tmp_path, build):
    records = [build.a_record("one", median_us=us) for us in (6.0, 999.0)]
    write_records(tmp_path / "a.jsonl", records)

    import_file(session, tmp_path / "a.jsonl")

    assert [record.median_us for record in queries.stored_records(session, Record)] == [6.0]


@pytest.mark.usefixtures("stored_at_once")
def test_file_with_a_conflict_is_not_stored(session, tmp_path, build):
    write_records(tmp_path / "a.jsonl", [build.a_record(run=build.a_run("a", idempotency_key="x"))])
    both = [build.a_record("ok"), build.a_record(run=build.a_run("b", idempotency_key="x"))]
    write_records(tmp_path / "b.jsonl", both)
    import_file(session, tmp_path / "a.jsonl")

    with pytest.raises(ConflictError, match=r"'x' of run .*, which is stored"):
        import_file(session, tmp_path / "b.jsonl")

    assert len(list(queries.stored_records(session, Record))) == 1


def test_file_in_parts_is_stored_like_a_whole_one(database, session, tmp_path, three):
    write_records(tmp_path / "r.jsonl", three)

    summary = import_in_parts(database, tmp_path / "r.jsonl")

    assert summary == import_file(session, tmp_path / "r.jsonl")
    with database.session() as stored:
        records = list(queries.stored_records(stored, Record))
    assert records == list(queries.stored_records(session, Record))
    assert import_in_parts(database, tmp_path / "r.jsonl").added == 0


def test_file_in_parts_with_late_conflict_stores_nothing(database, tmp_path, build, monkeypatch):
    monkeypatch.setattr(exchange, "_A_TRANSACTION", 3)
    runs = [build.a_run(str(number), idempotency_key=f"x{number}") for number in range(8)]
    records = [build.a_record(str(run.uuid), run=run) for run in runs]
    records.append(build.a_record(run=build.a_run("b", idempotency_key="x7")))
    write_records(tmp_path / "r.jsonl", records)
    write_records(tmp_path / "seven.jsonl", records[7:8])
    import_in_parts(database, tmp_path / "seven.jsonl")

    with pytest.raises(ConflictError):
        import_in_parts(database, tmp_path / "r.jsonl")

    with database.session() as session:
        assert len(list(queries.stored_records(session, Record))) == 1


def test_invalid_record_leaves_the_existing_file_unchanged(tmp_path, build):
    path = tmp_path / "r.jsonl"
    write_records(path, [build.a_record()])
    before = path.read_bytes()

    with pytest.raises(RecordError, match="median_us is inf"):
        write_records(path, [build.a_record(), build.a_record(median_us=float("inf"))])

    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_gzip_file_depends_only_on_its_records(tmp_path, three):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_records(tmp_path / name, three)

    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()).count(b"\n") == 3


def test_unreadable_file_and_unknown_suffix_are_reported(tmp_path, build):
    with pytest.raises(ResultsFileError, match=r"use \.jsonl, \.jsonl\.gz or \.parquet"):
        write_records(tmp_path / "r.csv", [build.a_record()])
    with pytest.raises(ResultsFileError, match=r"can't read .*r\.jsonl: No such file"):
        list(read_records(tmp_path / "r.jsonl"))
    with pytest.raises(ResultsFileError, match=r"can't read .*r\.parquet: "):
        list(read_records(tmp_path / "r.parquet"))
    with pytest.raises(ResultsFileError, match=r"can't write .*r\.jsonl: No such file"):
        write_records(tmp_path / "nowhere" / "r.jsonl", [build.a_record()])

"""Series of any operation; those of before keep their keys and histories."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, select, text

from flexq_bench.db import queries, schema
from flexq_bench.db.engine import open_database, upgrade
from flexq_bench.db.exchange import import_file, read_records, write_records
from flexq_bench.db.jsonlines import record_line
from flexq_bench.db.queries import Filters
from flexq_bench.db.records import EXTERNAL_BACKEND, Record
from flexq_bench.db.store import add_record
from flexq_bench.db.tables import Series

EXAMPLES = Path(__file__).parents[2] / "examples"
# The fields that identified a series before there were operations.
IDENTITY = (
    *("kernel", "kernel_version", "variant", "backend", "stage", "cache", "metric", "unit"),
    *("direction", "m", "n", "k", "weight_bits", "act_bits", "group", "input_distribution"),
    *("protocol_version", "gpu"),
)
ATTENTION = {
    "kernel": "sdpa",
    "stage": "op",
    "case": "sdpa op cold attention_decode:batch=1,heads=32,cache=fp8",
    "operation": "attention_decode",
    "parameters": "batch=1 heads=32 cache=fp8",
    **dict.fromkeys("mnk"),
}
OTHER_TOOL = {
    "kernel": "requests",
    "backend": EXTERNAL_BACKEND,
    "stage": "",
    "metric": "throughput",
    "unit": "req/s",
    "project": "acme",
    "weight_bits": 0,
    "act_bits": 0,
    **dict.fromkeys("mnk", 1),
}


def key_of_before(values):
    identity = {name: values[name] for name in IDENTITY}
    identity |= {"project": values["project"]} if values.get("project") else {}
    plain = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(plain.encode()).hexdigest()


def keys(session):
    return set(session.scalars(select(Series.identity_hash)))


@pytest.mark.parametrize("name", ["h100/paper-fig10-llama-7b.parquet", "h200/fp6-fp16.parquet"])
def test_examples_have_the_series_of_before(session, name):
    import pyarrow.parquet as pq

    rows = pq.read_table(EXAMPLES / name, columns=[*IDENTITY, "project"]).to_pylist()

    import_file(session, EXAMPLES / name)

    assert keys(session) == {key_of_before(row) for row in rows}
    assert {row.operation for row in queries.series_names(session)} == {"linear"}


def test_history_of_a_linear_layer_goes_on(session, build, add):
    first = add("old", m=8)
    line = json.loads(record_line(build.a_record("new", m=8, run=build.a_run("next"))))

    assert not {"operation", "parameters"} & line.keys()  # earlier versions read it
    add("new", m=8, run=build.a_run("next"))
    [series] = queries.series_names(session)
    assert (series.parameters, series.m) == ("m=8 n=4096 k=4096", 8)
    assert keys(session) == {key_of_before({f: getattr(first, f) for f in (*IDENTITY, "project")})}


def test_parameters_distinguish_series_of_an_operation(session, add):
    add("a", **ATTENTION)
    add("b", **ATTENTION | {"parameters": "batch=8 heads=32 cache=fp8", "case": "another"})
    add("c", m=1)

    rows = queries.series_names(session)
    assert [(row.operation, row.parameters, row.m) for row in rows] == [
        ("linear", "m=1 n=4096 k=4096", 1),
        ("attention_decode", "batch=1 heads=32 cache=fp8", None),
        ("attention_decode", "batch=8 heads=32 cache=fp8", None),
    ]
    assert len(queries.latest_results(session, Filters(operations=("attention_decode",)))) == 2
    assert queries.operation_names(session, rows[0].gpu) == ("attention_decode", "linear")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_record_of_an_operation_survives_a_file_and_a_database(session, build, tmp_path, suffix):
    records = [build.a_record("a", **ATTENTION), build.a_record("b", m=4)]
    commit = build.a_commit(project="acme")
    records.append(build.a_record("c", **OTHER_TOOL, case="requests outside", commit=commit))
    path = tmp_path / f"records.{suffix}"

    write_records(path, records)
    import_file(session, path)

    assert list(read_records(path)) == records
    stored = queries.stored_records(session, Record)
    assert sorted(stored, key=lambda r: r.uuid) == sorted(records, key=lambda r: r.uuid)


def test_benchmark_without_a_shape_has_none(session, add):
    record = add("a", **OTHER_TOOL, case="requests outside throughput")

    [series] = queries.series_names(session)
    assert (series.operation, series.parameters) == ("", "")
    assert (series.m, series.n, series.k) == (None, None, None)
    before = {name: getattr(record, name) for name in IDENTITY} | dict.fromkeys("mnk", 1)
    assert keys(session) == {key_of_before(before | {"project": "acme"})}


@pytest.fixture(params=["sqlite", "postgresql"])
def before(request, tmp_path, monkeypatch):
    """A database of the revision before operations."""
    if request.param == "sqlite":
        path = str(tmp_path / "before.sqlite")
        url = f"sqlite:///{path}"
    else:
        path = url = request.getfixturevalue("empty_postgresql")
    engine = create_engine(url)
    with engine.begin() as connection:
        command.upgrade(schema.alembic_config(connection), "0026")
        rows = [
            {"kernel": "flexq-w6a6", "backend": "cuda", "m": 8, "n": 4096, "k": 128},
            {"kernel": "requests", "backend": "outside", "m": 1, "n": 1, "k": 1},
            {"kernel": "their-gemm", "backend": "outside", "m": 1, "n": 64, "k": 32},
            {"kernel": "empty", "backend": "cuda", "m": 1, "n": 1, "k": 1},
        ]
        for row in rows:
            names = dict.fromkeys(IDENTITY, 1) | dict.fromkeys(
                ("variant", "stage", "cache", "metric", "unit", "input_distribution", "gpu"), ""
            )
            values = names | {"direction": "lower", "identity_hash": row["kernel"]} | row
            columns = ", ".join(f'"{name}"' for name in values)
            places = ", ".join(f":{name}" for name in values)
            connection.execute(text(f"INSERT INTO series ({columns}) VALUES ({places})"), values)
    engine.dispose()
    return path


def test_upgrade_gives_stored_series_their_operation(before):
    with open_database(before, check_schema=False) as database:
        upgrade(database)
        with database.session() as session:
            columns = (Series.id, Series.identity_hash, Series.operation, Series.parameters)
            rows = session.execute(select(*columns).order_by(Series.id)).all()

    assert [tuple(row) for row in rows] == [
        (1, "flexq-w6a6", "linear", "m=8 n=4096 k=128"),
        (2, "requests", "", ""),
        (3, "their-gemm", "linear", "m=1 n=64 k=32"),
        (4, "empty", "linear", "m=1 n=1 k=1"),
    ]


def test_record_after_the_upgrade_joins_the_stored_series(build, tmp_path):
    path, record = str(tmp_path / "new.sqlite"), build.a_record("a", **OTHER_TOOL, case="a")
    with open_database(path) as database, database.session() as session:
        add_record(session, record)
        stored = keys(session)
    with open_database(path) as database, database.session() as session:
        other = build.a_record("b", **OTHER_TOOL, case="a", run=build.a_run("another"))
        add_record(session, other)
        assert keys(session) == stored

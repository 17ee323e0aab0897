"""Static metrics as stored series."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from flexq_bench.cli.app import main
from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.store import add_records, begin_run
from flexq_bench.kernels.runtime.occupancy import TARGETS
from flexq_bench.measure.machine_code.metrics import KINDS, instruction_values
from flexq_bench.results import static_series as series

LABEL, TARGET = "flexq-w6a6", "sm_86"
FEW_BUILDS = "cublaslt-w8a8"  # so that it is soon compiled for every target


@pytest.fixture(scope="module")
def values(toolchain):
    return list(series.static_values([LABEL], [TARGET]))


def a_commit(order: int, **changes) -> CommitInfo:
    parent = f"{order - 1:040x}" if order > 1 else None
    fields = {"sha": f"{order:040x}", "parent": parent, "topo_order": order, "dirty": False}
    return CommitInfo(**fields | changes)


def store(session, values, commit):
    run = begin_run(session, series.static_run(commit, values), commit)
    return add_records(session, [series.static_record(v, run, commit) for v in values])


def test_both_shapes_have_every_metric(values):
    by_shape = defaultdict(dict)
    for value in values:
        by_shape[value.shape.m, value.shape.n][value.metric.name] = value.value

    for shape in ((1, 4096), (8, 4096)):
        found = by_shape[shape]
        assert found["registers"] > 16
        assert found["spill_bytes"] == found["sass_local"] == 0
        assert found["shared_bytes"] > 1024
        assert found["warps_per_sm"] % 8 == 0
        assert found["sass_tensor"] >= 6
        assert found["sass_async_copy"] >= 3
        assert found["sass_all"] > sum(found[f"sass_{kind}"] for kind in KINDS) / 2
    worst = by_shape[1, 1]
    assert worst["worst_registers"] >= max(by_shape[m, 4096]["registers"] for m in (1, 8))
    assert worst["worst_warps_per_sm"] <= min(by_shape[m, 4096]["warps_per_sm"] for m in (1, 8))
    assert worst["worst_warps_per_sm"] > 0


def test_padding_instructions_are_not_counted():
    names = [name for kind in KINDS.values() for name in kind]
    assert len(names) == len(set(names))

    found = instruction_values({"BMMA": 6, "LDG": 2, "MOV": 3, "NOP": 10})

    by_name = {metric.name: value for metric, value in found.items()}
    assert by_name["sass_tensor"] == 6
    assert by_name["sass_global_load"] == 2
    assert by_name["sass_all"] == 11


def test_each_metric_is_a_series_by_commit(values, tmp_path):
    with open_database(str(tmp_path / "flexq.sqlite")) as database:
        with database.session() as session:
            assert store(session, values, a_commit(1)) == len(values)
            assert store(session, values, a_commit(1)) == 0
            assert store(session, values, a_commit(2)) == len(values)
        with database.session() as session:
            rows = queries.list_series(session)
            (registers,) = [r for r in rows if (r.metric, r.m) == ("registers", 8)]
            history = queries.series_history(session, registers.id)

    assert len(rows) == len(values)
    assert (registers.backend, registers.gpu, registers.unit) == ("static", TARGET, "registers")
    assert {r.direction for r in rows if r.metric == "warps_per_sm"} == {"higher"}
    assert [point.commit for point in history] == [a_commit(1).sha, a_commit(2).sha]
    expected = next(v.value for v in values if (v.metric.name, v.shape.m) == ("registers", 8))
    assert [point.median_us for point in history] == [expected, expected]


def test_moved_source_stays_in_its_series(values, tmp_path):
    moved = [replace(v, build=replace(v.build, source="elsewhere/gemm.cu")) for v in values]
    with open_database(str(tmp_path / "flexq.sqlite")) as database:
        with database.session() as session:
            store(session, values, a_commit(1))
            store(session, moved, a_commit(2))
        with database.session() as session:
            rows = queries.list_series(session)
            histories = [queries.series_history(session, row.id) for row in rows]

    assert len(rows) == len(values)
    assert {len(history) for history in histories} == {2}


def test_another_compiler_opens_an_epoch(values, tmp_path, monkeypatch):
    with open_database(str(tmp_path / "flexq.sqlite")) as database:
        with database.session() as session:
            store(session, values[:1], a_commit(1))
            monkeypatch.setattr(series, "compiler_version", lambda: "99.0")
            assert store(session, values[:1], a_commit(1)) == 1
        with database.session() as session:
            (row,) = queries.list_series(session)
            points = queries.series_history(session, row.id)

    assert len({point.epoch for point in points}) == 2


def test_local_changes_are_not_stored(values):
    dirty = a_commit(1, dirty=True)
    run = series.static_run(dirty, values)

    assert not series.static_record(values[0], run, dirty).accepted
    assert series.static_record(values[0], run, replace(dirty, dirty=False)).accepted
    assert series.static_run(dirty, values).uuid != run.uuid


def test_command_writes_importable_results(values, tmp_path, capsys):
    file, one, two = (str(tmp_path / name) for name in ("s.jsonl", "one.sqlite", "two.sqlite"))

    assert main(("static", "--kernels", FEW_BUILDS, "--db", one, "--json", file)) == 0
    assert main(("db", "import", file, "--db", two)) == 0
    capsys.readouterr()
    listed = []
    for database in (one, two):
        assert main(("list", "series", "--db", database, "--json")) == 0
        listed.append(json.loads(capsys.readouterr().out))

    assert listed[0] == listed[1]
    assert {row["gpu"] for row in listed[0]} == set(TARGETS)


def test_a_kernel_without_code_of_ours_is_refused(capsys, tmp_path):
    assert main(("static", "--kernels", "cublas-fp16", "--db", str(tmp_path / "x.sqlite"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no kernel with code of ours 'cublas-fp16': there are cublaslt-" in line
    assert not (tmp_path / "x.sqlite").exists()

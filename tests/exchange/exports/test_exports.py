"""Exports against the published schemas of their formats."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from flexq_bench.exchange.exports.formats import EXPORTS, write_export
from flexq_bench.exchange.exports.spreadsheets import write_csv, write_xlsx

jsonschema = pytest.importorskip("jsonschema")

# https://bencher.dev/bmf.json (bencherdev/bencher, services/console/public/bmf.json), stricter: no
# other properties, and the limits of names from
# https://bencher.dev/docs/reference/bencher-metric-format
BENCHER: dict[str, Any] = {
    "type": "object",
    "propertyNames": {"minLength": 1, "maxLength": 1024},
    "additionalProperties": {
        "type": "object",
        "propertyNames": {"minLength": 1, "maxLength": 64},
        "additionalProperties": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "lower_value": {"type": "number"},
                "upper_value": {"type": "number"},
            },
            "required": ["value"],
            "additionalProperties": False,
        },
    },
}

# mozilla/treeherder, schemas/performance-artifact.json: the properties that we write, with their
# limits; the subtest's name is limited as in mozilla-firefox/firefox,
# testing/performance/common/performance-artifact-schema.json.
_VALUE = {"type": "number", "minimum": -1e12, "maximum": 1e12}
_UNIT = {"type": "string", "minLength": 1, "maxLength": 20}
PERFHERDER: dict[str, Any] = {
    "type": "object",
    "required": ["framework", "suites"],
    "additionalProperties": False,
    "properties": {
        "framework": {"type": "object", "properties": {"name": {"type": "string"}}},
        "suites": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "subtests"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "extraOptions": {
                        "type": "array",
                        "items": {"type": "string", "maxLength": 100},
                        "uniqueItems": True,
                        "maxItems": 8,
                    },
                    "subtests": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["name", "value"],
                            "additionalProperties": False,
                            "properties": {
                                "name": {"type": "string", "maxLength": 80},
                                "value": _VALUE,
                                "unit": _UNIT,
                                "lowerIsBetter": {"type": "boolean"},
                            },
                        },
                    },
                },
            },
        },
    },
}

# pytorch/test-infra, clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql: the columns of the table
# that takes the records, of which the uploader fills in those of the workflow; a map is of text to
# text, and numbers of a runner are counts. What a record must have is said on
# github.com/pytorch/pytorch/wiki/PyTorch-OSS-benchmark-infra, "Benchmark results format".
_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_EXTRA = {"type": "object", "additionalProperties": _TEXT}
PYTORCH_HUD: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["benchmark", "model", "metric"],
        "additionalProperties": False,
        "properties": {
            "benchmark": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": _TEXT,
                    "mode": {"enum": ["training", "inference"]},
                    "dtype": _TEXT,
                    "extra_info": _EXTRA,
                },
            },
            "model": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": _TEXT,
                    "type": _TEXT,
                    "backend": _TEXT,
                    "origins": {"type": "array", "items": _TEXT},
                    "extra_info": _EXTRA,
                },
            },
            "metric": {
                "type": "object",
                "required": ["name", "benchmark_values"],
                "additionalProperties": False,
                "properties": {
                    "name": _TEXT,
                    "benchmark_values": {"type": "array", "items": {"type": "number"}},
                    "target_value": {"type": "number"},
                    "extra_info": _EXTRA,
                },
            },
            "inputs": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"dtype": _TEXT, "extra_info": _EXTRA},
                },
            },
            "dependencies": {
                "type": "object",
                "additionalProperties": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "repo": _TEXT,
                        "branch": _TEXT,
                        "sha": _TEXT,
                        "version": _TEXT,
                        "extra_info": _EXTRA,
                    },
                },
            },
            "runners": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {
                        **dict.fromkeys(("name", "type", "cpu_info", "mem_info"), _TEXT),
                        **dict.fromkeys(("gpu_info", "gpu_mem_info"), _TEXT),
                        **dict.fromkeys(("cpu_count", "gpu_count"), _COUNT),
                        **dict.fromkeys(("avail_mem_in_gb", "avail_gpu_mem_in_gb"), _COUNT),
                        "extra_info": _EXTRA,
                    },
                },
            },
        },
    },
}

SCHEMAS = {"bencher": BENCHER, "perfherder": PERFHERDER, "pytorch-hud": PYTORCH_HUD}


@pytest.fixture
def records(build):
    """Results of ours, old and new, of machine code, of another project, wrong and failed."""
    newer = {"created_at": "2025-11-22T10:00:00+00:00", "median_us": 7.0, "ci_high_us": 7.2}
    odd = {"project": "their/kernels", "backend": "outside", "stage": "", "cache": ""}
    speed = {"metric": "bandwidth", "unit": "GB/s of what is read", "direction": "higher"}
    return [
        build.a_record(),
        build.a_record("newer", run=build.a_run("newer"), **newer),
        build.a_record("m8", m=8, variant="-evict-first"),
        build.a_record("code", backend="static", metric="registers", unit="registers"),
        build.a_record("odd", kernel='a "b" \\ c' + "x" * 200, variant="y" * 300, **odd),
        build.a_record("speed", **speed, **odd),
        build.a_record("wrong", status="incorrect", m=2),
        build.a_record("failed", status="failed", m=4, median_us=None),
    ]


@pytest.fixture
def exported(records, tmp_path):
    def write(name):
        path = tmp_path / "out"
        count = write_export(name, path, records)
        return path.read_text(), count

    return write


@pytest.mark.parametrize("name", SCHEMAS)
def test_export_matches_the_published_schema(exported, name):
    text, count = exported(name)

    jsonschema.Draft7Validator(SCHEMAS[name]).validate(json.loads(text))
    assert count == (6 if name == "pytorch-hud" else 5)


@pytest.mark.parametrize("name", EXPORTS)
def test_empty_export_is_valid(tmp_path, name):
    assert write_export(name, tmp_path / "out", []) == 0

    if name == "xlsx":
        return
    text = (tmp_path / "out").read_text()
    if name in SCHEMAS:
        jsonschema.Draft7Validator(SCHEMAS[name]).validate(json.loads(text))
    elif name == "csv":
        assert len(text.splitlines()) == 1
    else:
        assert text == "# EOF\n"


@pytest.mark.parametrize("name", sorted({*EXPORTS} - {"xlsx"}))
def test_unaccepted_results_are_not_exported(exported, name):
    text, _ = exported(name)

    assert "m2n4096" not in text
    assert 'm="2"' not in text


def test_bencher_has_newest_latency_in_nanoseconds(exported):
    benchmarks = json.loads(exported("bencher")[0])

    metric = benchmarks["flexq-w6a6 gemm cold m1n4096k4096 on NVIDIA H200"]["latency"]
    assert metric == pytest.approx({"value": 7000, "lower_value": 6000, "upper_value": 7200})


def test_perfherder_has_a_suite_per_kernel_and_gpu(exported):
    suites = json.loads(exported("perfherder")[0])["suites"]

    (plain,) = [one for one in suites if one["name"] == "flexq-w6a6"]
    assert plain["extraOptions"] == ["NVIDIA H200"]
    name = "time gemm cold m1n4096k4096 p1"
    subtest = {"name": name, "value": 7.0, "unit": "us", "lowerIsBetter": True}
    assert subtest in plain["subtests"]


@pytest.mark.parametrize("name", ["bencher", "perfherder"])
def test_series_with_other_inputs_have_other_names(build, tmp_path, name):
    records = [build.a_record(one, input_distribution=one) for one in ("normal", "zeros")]

    assert write_export(name, tmp_path / "out", records) == 2
    text = (tmp_path / "out").read_text()
    assert text.count("m1n4096k4096 p1" if name == "perfherder" else "on NVIDIA H200") == 2
    assert text.count("zeros") == 1


def test_pytorch_hud_has_every_result_with_its_commit(exported, records):
    rows = json.loads(exported("pytorch-hud")[0])

    assert [row["metric"]["benchmark_values"] for row in rows[:2]] == [[6.1], [7.0]]
    assert rows[0]["dependencies"]["flexq-bench"]["sha"] == records[0].commit.sha
    assert rows[0]["metric"]["name"] == "time(us)"


def test_prometheus_parser_reads_openmetrics(exported, records):
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    text, count = exported("openmetrics")

    families = {one.name: one for one in parser.text_string_to_metric_families(text)}

    assert count == 5
    times = families["flexq_bench_time_seconds"]
    assert (times.type, times.unit) == ("gauge", "seconds")
    by_label = {
        (s.labels["kernel"], s.labels.get("variant", ""), s.labels["m"]): s for s in times.samples
    }
    assert by_label["flexq-w6a6", "", "1"].value == pytest.approx(7.0e-6)
    assert (records[4].kernel, records[4].variant, "1") in by_label
    values = families["flexq_bench_value"].samples
    (registers,) = [s for s in values if s.labels["metric"] == "registers"]
    assert registers.value == 6.1
    commits = families["flexq_bench_commit_info"].samples
    assert {s.labels["series"] for s in commits} == {
        s.labels["series"] for s in (*times.samples, *values)
    }
    assert {s.labels["commit"] for s in commits} == {records[0].commit.sha}
    assert not any("commit" in s.labels for s in (*times.samples, *values))


def test_new_commit_continues_the_time_series(build, tmp_path):
    old, new = (
        build.a_record(name, commit=build.a_commit(order)) for name, order in (("a", 1), ("b", 2))
    )
    lines = []
    for record in (old, new):
        write_export("openmetrics", tmp_path / "out", [record])
        text = (tmp_path / "out").read_text()
        (line,) = [t for t in text.splitlines() if t.startswith("flexq_bench_time_seconds{")]
        lines.append(line.split("}")[0])

    assert old.commit.sha != new.commit.sha
    assert lines[0] == lines[1]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_openmetrics(exported):
    text, _ = exported("openmetrics")

    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )

    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted({*EXPORTS} - {"xlsx"}))
def test_result_without_a_matrix_has_no_sizes_or_bits(build, tmp_path, name):
    nothing = {"weight_bits": 0, "act_bits": 0, "group": None, "m": None, "n": None, "k": None}
    rate = build.a_record(
        kernel="decode", case="engine.decode", backend="outside", operation="", parameters="",
        stage="", cache="", metric="rate", unit="tokens/s", direction="higher", project="engine",
        **nothing,
    )  # fmt: skip
    attention = build.a_record(
        "op", case="flexq op cold attention_decode batch=1 heads=32", stage="op",
        operation="attention_decode", parameters="batch=1 heads=32",
        **nothing | {"weight_bits": 16, "act_bits": 16},
    )  # fmt: skip

    write_export(name, tmp_path / "out", [rate, attention])

    text = (tmp_path / "out").read_text()
    assert not re.search(r"m\d*n\d*k\d*\b|\bw0a0|w16a16|None", text.replace("mnk", ""))
    assert re.search(r"heads\W{1,4}32|,32,", text)


def test_tables_have_a_row_for_each_result(exported, records):
    openpyxl = pytest.importorskip("openpyxl", reason="not installed")
    text, count = exported("csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    name = io.BytesIO(write_xlsx(records)[0])
    names, *cells = openpyxl.load_workbook(name).active.iter_rows(values_only=True)

    assert count == len(rows) == len(cells) == 6
    assert [float(row["value"]) for row in rows][:2] == [6.1, 7.0]
    assert rows[0]["m"] == "1"
    assert list(names) == list(rows[0])
    for row, of_sheet in zip(rows, cells, strict=True):
        sheet = dict(zip(names, of_sheet, strict=True))
        assert sheet["value"] == float(row["value"])
        assert (sheet["kernel"], sheet["commit"]) == (row["kernel"], row["commit"])


def test_formula_in_a_name_becomes_a_text(build):
    text, _ = write_csv([build.a_record(kernel="=HYPERLINK(1)", project="+1+1")])

    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["kernel"], row["project"]) == ("'=HYPERLINK(1)", "'+1+1")

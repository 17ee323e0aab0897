"""Readers of other tools' result files."""

from __future__ import annotations

import array
import json
from importlib import metadata
from pathlib import Path

import pytest

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external import result
from flexq_bench.exchange.external.formats import FORMATS, read_results

MADE_BY_THE_TOOL = Path(__file__).parent


def refusals(reading):
    return [f"{one.name}: {one.reason}" for one in reading.refused]


# nvbench


def summary(tag, value, kind="float64", name="value"):
    return {"tag": tag, "data": [{"name": name, "type": kind, "value": str(value)}]}


def state(*summaries, **changes):
    axes = [
        {"name": "M", "type": "int64", "input_string": "8", "value": "8"},
        {"name": "N", "type": "int64", "input_string": "4096", "value": "4096"},
        {"name": "K", "type": "int64", "input_string": "2^12", "value": "4096"},
        {"name": "T", "type": "type", "input_string": "I32", "description": "int32_t"},
    ]
    timed = [
        summary("nv/cold/sample_size", 400, "int64"),
        summary("nv/cold/time/gpu/mean", 2.0e-05),
        summary("nv/cold/time/gpu/stdev/relative", 0.01),
    ]
    return {
        "name": "Device=0 M=8 T=I32",
        "device": 0,
        "axis_values": axes,
        "summaries": [*timed, *summaries],
        "is_skipped": False,
    } | changes


def nvbench(*states):
    return {
        "meta": {"version": {"nvbench": {"string": "0.3.0"}}},
        "devices": [{"id": 0, "name": "NVIDIA H200"}],
        "benchmarks": [{"name": "gemm", "devices": [0], "axes": [], "states": list(states)}],
    }


def test_nvbench_means_have_the_interval_of_their_deviation(read):
    (one,) = read("nvbench", nvbench(state())).results

    assert (one.name, one.variant, one.shape) == ("gemm", "T=I32", (8, 4096, 4096))
    assert (one.device, one.cache, one.environment["statistic"]) == ("NVIDIA H200", "cold", "mean")
    assert one.median == pytest.approx(20.0)
    assert one.high - one.low == pytest.approx(2 * 1.96 * 0.01 * 20 / 20)


def test_nvbench_medians_and_batches_are_read(read):
    quartiles = [summary(f"nv/cold/time/gpu/{q}", v) for q, v in (("q1", 1e-5), ("q3", 2e-5))]
    batch = summary("nv/batch/time/gpu/mean", 9e-6)
    median = summary("nv/cold/time/gpu/median", 1.5e-5)

    cold, hot = read("nvbench", nvbench(state(median, batch, *quartiles))).results

    assert (cold.median, cold.environment["statistic"]) == (pytest.approx(15.0), "median")
    assert cold.high == pytest.approx(15 + 1.57 * 10 / 20)
    assert (hot.cache, hot.median) == ("hot", pytest.approx(9.0))


@pytest.mark.parametrize("deviation", ["inf", "-nan"])
def test_nvbench_of_few_samples_has_no_interval(read, deviation):
    """It writes an infinite deviation of fewer than five."""
    few = state(summary("nv/cold/time/gpu/stdev/relative", deviation))

    (one,) = read("nvbench", nvbench(few)).results

    assert (one.median, one.low, one.high) == (pytest.approx(20.0), None, None)


def binary(filename, size):
    return {
        "tag": "nv/json/bin:nv/cold/sample_times",
        "data": [
            {"name": "filename", "type": "string", "value": filename},
            {"name": "size", "type": "int64", "value": str(size)},
        ],
    }


def test_nvbench_samples_are_read_from_the_same_folder_only(read, tmp_path):
    (tmp_path / "times.bin").write_bytes(array.array("f", [1e-5, 3e-5, 2e-5]).tobytes())
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    (elsewhere / "times.bin").write_bytes(array.array("f", [1.0]).tobytes())

    (own,) = read("nvbench", nvbench(state(binary("times.bin", 3)))).results
    far = state(binary(str(elsewhere.parent.parent / "times.bin"), 1))
    (other,) = read("nvbench", nvbench(far)).results

    assert own.samples == pytest.approx([10, 30, 20])
    assert own.median == pytest.approx(20)
    assert other.samples == ()


def test_malformed_nvbench_states_are_refused_alone(read):
    bad = state(summary("nv/cold/time/gpu/median", "soon"), name="M=1")
    none = {**state(), "name": "M=2", "summaries": []}
    skipped = state(name="M=3\0\ud800", is_skipped=True, skip_reason="too large", axis_values=[])

    reading = read("nvbench", nvbench(state(), bad, none, skipped))

    assert [one.median is None for one in reading.results] == [False, True]
    assert reading.results[1].detail == "too large"
    assert reading.results[1].extra["state"] == "M=3??"
    assert refusals(reading) == [
        "gemm M=1: nv/cold/time/gpu/median is no number",
        "gemm M=2: it has no time: no nv/cold, nv/batch or nv/cpu_only summary",
    ]


def test_nvbench_devices_of_one_name_are_one_series(read):
    file = nvbench(*(state(device=number, name=f"Device={number}") for number in (1, 2, 3)))
    names = ("NVIDIA H200", "NVIDIA H200", "NVIDIA H200", "NVIDIA L4")  # nothing ran on the first
    file["devices"] = [{"id": number, "name": name} for number, name in enumerate(names)]

    reading = read("nvbench", file)

    assert [(one.device, one.extra["state"]) for one in reading.results] == [
        ("NVIDIA H200", "Device=1"),
        ("NVIDIA L4", "Device=3"),
    ]
    assert refusals(reading) == [
        "device 2: it is another NVIDIA H200, and device 1 is read: run with --devices 1"
    ]


def test_real_nvbench_file_is_read():
    """cuda-bench's wheel holds a file that nvbench wrote for its own tests."""
    try:
        files = metadata.files("cuda-bench") or []
    except metadata.PackageNotFoundError:
        pytest.skip("cuda-bench is not installed")
    path = next(Path(one.locate()) for one in files if one.name == "test_ref.json")
    states = sum(len(b["states"]) for b in json.loads(path.read_text())["benchmarks"])

    (reading,) = read_results("nvbench", str(path))

    assert reading.refused == ()
    assert sum(one.cache == "cold" for one in reading.results) == states
    assert {one.device for one in reading.results} == {"Quadro GV100", "Quadro GP100"}


# Google Benchmark


def google(*entries):
    context = {"date": "2026-01-31T02:00:00+01:00", "library_version": "v1.9.0"}
    return {"context": context, "benchmarks": list(entries)}


def iteration(name="BM_gemm/m:8/n:64/k:32/real_time", index=0, **changes):
    return {
        "name": name,
        "run_name": name,
        "run_type": "iteration",
        "repetition_index": index,
        "iterations": 1000,
        "real_time": 1500.0 + index,
        "cpu_time": 1400.0,
        "time_unit": "ns",
    } | changes


def test_real_google_benchmark_file_is_read():
    """Of three repetitions a benchmark, made by the Python package google-benchmark 1.9.5."""
    (reading,) = read_results("google-benchmark", str(MADE_BY_THE_TOOL / "google_benchmark.json"))

    assert reading.refused == ()
    assert reading.created_at.startswith("2026-11-23T02:43:24")
    few, many, failed = reading.results
    assert [(one.name, one.shape, len(one.samples)) for one in (few, many)] == [
        ("BM_w6a8", (1, 64, 32), 3),
        ("BM_w6a8", (8, 64, 32), 3),
    ]
    assert (failed.name, failed.median, failed.detail) == ("BM_fails", None, "no GPU")


def test_google_benchmark_repetitions_are_samples(read):
    reading = read("google-benchmark", google(*(iteration(index=i) for i in range(5))))

    (one,) = reading.results
    assert (one.name, one.variant, one.shape) == ("BM_gemm", "real_time=true", (8, 64, 32))
    assert one.samples == pytest.approx([1.5, 1.501, 1.502, 1.503, 1.504])
    assert one.median == pytest.approx(1.502)
    assert reading.created_at == "2026-01-31T01:00:00+00:00"


def test_google_benchmark_aggregates_are_read_without_iterations(read):
    def aggregate(kind, time, name="BM_sort<a/b>/64"):
        return iteration(name, run_type="aggregate", aggregate_name=kind, real_time=time)

    entries = [aggregate("mean", 3), aggregate("median", 2), aggregate("stddev", 1)]
    big_o = iteration("BM_sort_BigO", run_type="aggregate", aggregate_name="BigO")
    reading = read("google-benchmark", google(*entries, big_o))

    (one,) = reading.results
    assert (one.name, one.variant, one.environment["statistic"]) == (
        "BM_sort<a/b>",
        "arg0=64",
        "median",
    )
    assert one.median == pytest.approx(0.002)


def test_google_benchmark_errors_are_reported(read):
    failed = iteration("BM_a", error_occurred=True, error_message="no GPU")
    bad = [
        iteration("BM_b", real_time=-1),
        iteration("BM_c", time_unit="hours"),
        iteration("BM_d", real_time="NaN"),
        {"name": "BM_e", "run_type": "iteration"},
        iteration(None),
    ]
    reading = read("google-benchmark", google(failed, *bad))

    assert [(one.median, one.detail) for one in reading.results] == [(None, "no GPU")]
    assert [text.split(":")[0] for text in refusals(reading)] == [
        *("BM_b", "BM_c", "BM_d", "BM_e", "benchmark 6")
    ]
    assert "-0.001 µs is not a plausible time" in refusals(reading)[0]


def test_old_google_benchmark_aggregates_are_ignored(read):
    """They tell neither run types nor which repetition it was."""

    def entry(name, time):
        return {"name": name, "iterations": 9, "real_time": time, "time_unit": "us"}

    aggregates = [entry(f"BM_a_{one}", 5) for one in ("mean", "median", "stddev")]
    file = google(*(entry("BM_a", time) for time in (1, 3, 2)), *aggregates, entry("BM_mean", 7))

    reading = read("google-benchmark", file)

    assert [(one.name, one.median) for one in reading.results] == [("BM_a", 2), ("BM_mean", 7)]
    (centre, other) = read("google-benchmark", google(*aggregates, entry("BM_mean", 7))).results
    assert (centre.name, centre.median, other.median) == ("BM_a", 5, 7)


# pytest-benchmark


def test_real_pytest_benchmark_file_is_read():
    path = MADE_BY_THE_TOOL / "pytest_benchmark.json"
    (reading,) = read_results("pytest-benchmark", str(path))
    raw, summary_only = reading.results

    assert (raw.name, raw.shape) == ("test_b.py::test_sum", (1, 64, 1))
    assert raw.low < raw.median < raw.high
    assert len(raw.samples) == 64
    assert summary_only.samples == ()
    assert raw.device.startswith("AMD EPYC")


def test_pytest_benchmark_entries_without_statistics_are_refused(read):
    file = json.loads((MADE_BY_THE_TOOL / "pytest_benchmark.json").read_text())
    del file["benchmarks"][0]["stats"]["median"]
    file["benchmarks"].append("nothing")

    reading = read("pytest-benchmark", file)

    assert len(reading.results) == 1
    assert refusals(reading) == [
        "test_b.py::test_sum[1-64]: 'median' is missing",
        "benchmark 3: it has another form",
    ]


def test_pytest_benchmark_parameters_are_separate(read):
    file = json.loads((MADE_BY_THE_TOOL / "pytest_benchmark.json").read_text())
    fine = file["benchmarks"][0] | {"params": {"run": "<function gemm at 0x7f00>"}}
    broken = fine | {"fullname": "b.py::test_c", "has_error": True, "stats": None}
    unnamed = [fine | {"fullname": f"b.py::test_d[{one}]", "params": None, "param": None}
               for one in "12"]  # fmt: skip

    reading = read("pytest-benchmark", file | {"benchmarks": [fine, broken, *unnamed]})

    assert reading.refused == ()
    assert [one.variant for one in reading.results[::2]] == ["run=<function gemm>", "1"]
    assert reading.results[3].variant == "2"
    assert reading.results[1].median is None
    assert "raised an error" in reading.results[1].detail


def test_pytest_benchmark_brackets_in_folders_are_no_parameters(read):
    file = json.loads((MADE_BY_THE_TOOL / "pytest_benchmark.json").read_text())
    fine = file["benchmarks"][0] | {"params": {"m": 1}}
    tests = [fine | {"name": f"{one}[1::a[0]]", "fullname": f"[x]/b.py::A::{one}[1::a[0]]"}
             for one in ("test_a", "test_b")]  # fmt: skip
    unnamed = fine | {"name": "test_c[1::2]", "fullname": "[x]/b.py::test_c[1::2]", "params": None}
    unnamed |= {"param": None}

    reading = read("pytest-benchmark", file | {"benchmarks": [*tests, unnamed]})

    assert reading.refused == ()
    assert [(one.name, one.variant) for one in reading.results] == [
        ("[x]/b.py::A::test_a", ""),
        ("[x]/b.py::A::test_b", ""),
        ("[x]/b.py::test_c", "1::2"),
    ]


# Criterion


def complete(**changes):
    def estimate(value):
        return {"estimate": value, "lower_bound": value - 1, "upper_bound": value + 1, "unit": "ns"}

    message = {
        "reason": "benchmark-complete",
        "id": "gemm/w6a8/64",
        "iteration_count": [10, 20],
        "measured_values": [1000.0, 2100.0],
        "unit": "ns",
        "median": estimate(102.0),
        "mean": estimate(103.0),
    } | changes
    return json.dumps(message)


def test_criterion_messages_are_read_line_by_line(read):
    other = json.dumps({"reason": "group-complete", "group_name": "gemm", "benchmarks": []})

    (one,) = read("criterion", "\n".join([complete(), other, ""])).results

    assert (one.name, one.variant) == ("gemm/w6a8", "64")
    assert (one.low, one.median, one.high) == pytest.approx((0.101, 0.102, 0.103))
    assert one.samples == pytest.approx((0.1, 0.105))


def test_truncated_criterion_lines_are_refused(read):
    reading = read("criterion", "\n".join([complete(), complete(iteration_count=[1]), "{"]))

    assert len(reading.results) == 1
    assert refusals(reading) == [
        "gemm/w6a8/64: it has not one measured value for each iteration count",
        "line 3: it is no JSON object",
    ]


def test_criterion_folder_has_newest_results(read, tmp_path):
    def estimate(value):
        interval = {"confidence_level": 0.95, "lower_bound": value - 1, "upper_bound": value + 1}
        return {"point_estimate": value, "confidence_interval": interval, "standard_error": 0.5}

    for name, value in (("new", 102.0), ("base", 90.0)):
        folder = tmp_path / "criterion" / "gemm" / "w6a8" / "64" / name
        folder.mkdir(parents=True)
        about = {"group_id": "gemm", "function_id": "w6a8", "full_id": "gemm/w6a8/64"}
        sample = {"sampling_mode": "Linear", "iters": [10.0, 20.0], "times": [1000.0, 2100.0]}
        told = {"benchmark": about, "estimates": {"median": estimate(value)}, "sample": sample}
        for stem, content in told.items():
            (folder / f"{stem}.json").write_text(json.dumps(content))
    broken = tmp_path / "criterion" / "gemm" / "cut" / "new"
    broken.mkdir(parents=True)
    (broken / "benchmark.json").write_text("{")

    (reading,) = read_results("criterion", str(tmp_path / "criterion"))

    (one,) = reading.results
    assert one == read("criterion", complete()).results[0]
    (refused,) = reading.refused
    assert "benchmark.json is not JSON" in refused.reason
    with pytest.raises(UsageError, match=r"holds no new/benchmark\.json"):
        list(
            read_results("criterion", str(tmp_path / "criterion" / "gemm" / "w6a8" / "64" / "base"))
        )


def test_repeated_result_is_refused_once(read):
    reading = read("csv", "benchmark,value\ngemm,1\ngemm,2\n")

    assert [one.median for one in reading.results] == [1.0]
    assert "another result of this name" in refusals(reading)[0]


# All of them


def test_file_with_too_many_results_is_refused(read, monkeypatch):
    monkeypatch.setattr(result, "MAX_RESULTS", 2)
    runs = [iteration(name=name) for name in ("gemm", "other", "third")]
    assert len(read("google-benchmark", google(*runs[:2])).results) == 2
    with pytest.raises(UsageError, match="more than 2 results in a file"):
        read("google-benchmark", google(*runs))


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("content", ["", "[]", "{}", "\x00", "{" * 100_000, "null"])
def test_file_of_another_format_is_refused(read, format_name, content):
    with pytest.raises(UsageError):
        read(format_name, content)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_byte_order_mark_determines_the_encoding(read, encoding):
    (named,) = read("csv", "benchmark,value\nGröße,1\n", encoding=encoding).results
    (other,) = read("google-benchmark", google(iteration()), encoding=encoding).results

    assert (named.name, other.median is None) == ("Größe", False)


def test_nvbench_of_another_major_version_is_refused(read):
    with pytest.raises(UsageError, match="is of version 2 of nvbench's JSON, 1 is read here"):
        read("nvbench", {**nvbench(state()), "meta": {"version": {"json": {"major": 2}}}})


def test_file_of_another_tool_is_one_line(read):
    with pytest.raises(
        UsageError, match=r"none of its 2 results can be read, 'fullname' is mis.*\?"
    ):
        read("pytest-benchmark", google(iteration(), iteration(index=1)))


@pytest.mark.parametrize("format_name", FORMATS)
def test_endless_file_is_not_read(format_name):
    with pytest.raises(UsageError, match="no regular file"):
        list(read_results(format_name, "/dev/zero"))


def test_file_of_too_many_values_is_refused_before_parsing(tmp_path, monkeypatch):
    monkeypatch.setattr(result, "MAX_CELLS", 100)
    path = tmp_path / "a.json"
    path.write_text('{"benchmarks": [' + "[]," * 100 + "0]}")

    with pytest.raises(UsageError, match="has over 100 values: split it"):
        result.read_json(str(path), "an nvbench file")


# Quality data


def test_nvbench_clock_below_the_device_is_stored_and_remarked(read):
    clock = summary("nv/cold/sm_clock_rate/mean", 1035.3e6)
    own = summary("acme/bytes", 12.5)
    file = nvbench(state(clock, own))
    file["devices"][0]["sm_default_clock_rate"] = 1785000000

    (one,) = read("nvbench", file).results

    assert one.sm_clock_mhz == pytest.approx(1035.3)
    assert one.remarks == ("the SM clock was 58% of the device's 1785 MHz",)
    assert one.extra["summaries"] == {"acme/bytes": {"value": "12.5"}}


def test_cub_axes_are_the_shape(read):
    axes = [
        {"name": "M{io}", "type": "int64", "value": "64"},
        {"name": "T{ct}", "type": "type", "input_string": "I32"},
    ]

    (one,) = read("nvbench", nvbench(state(axis_values=axes))).results

    assert (one.shape, one.variant) == ((64, 1, 1), "T{ct}=I32")


def test_pytest_benchmark_with_shortened_samples_keeps_its_median(read):
    stats = {"median": 1.5e-5, "q1": 1e-5, "q3": 2e-5, "rounds": 900, "data": [1e-5, "… 898 more"]}
    entry = {"fullname": "a.py::test", "stats": stats, "extra_info": {"flops": 12}}
    file = {"benchmarks": [entry], "commit_info": {"id": "c" * 40, "dirty": True}}

    (one,) = read("pytest-benchmark", file).results

    assert (one.median, one.samples, one.n_samples) == (15.0, (), 900)
    assert one.extra["extra_info"] == {"flops": 12}
    assert one.remarks == ("measured with uncommitted changes",)


def test_google_benchmark_keeps_counters_and_remarks_scaling(read):
    file = google(iteration(bytes_per_second=2e9))
    file["context"] = {"cpu_scaling_enabled": True, "library_build_type": "debug"}

    (one,) = read("google-benchmark", file).results

    assert one.extra["counters"] == {"bytes_per_second": [2e9]}
    assert [remark.partition(":")[0] for remark in one.remarks] == [
        "the clock of the CPU varied",
        "the benchmark library is a debug build",
    ]

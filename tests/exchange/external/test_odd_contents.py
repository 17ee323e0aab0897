"""What tools write in legal, unusual files: it is read, or is no reason to lose other results."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import suppress

import pytest

from flexq_bench.db.units import is_rate, scale_of
from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.formats import FORMATS, detect_format, read_results

COLOURED = "\x1b[32mfib 20\x1b[0m   time:   [\x1b[2m1.5 ms\x1b[0m \x1b[1m1.6 ms\x1b[0m 1.7 ms]\n"
CATCH2 = """benchmark name            samples       iterations    est run time
-------------------------------------------------------------------------------
a long name that is
wrapped                            100             1     2.5 s
                                 1.5 m         1.4 m         1.6 m
                               15.1 us        7.0 us       25.7 us
"""
FAILED_CATCH2 = (
    '<Catch2TestRun><TestCase name="t"><BenchmarkResults name="fib" samples="1">'
    '<failed message="it threw"/></BenchmarkResults></TestCase></Catch2TestRun>'
)
GO = (
    "Unit widgets/op better=higher\n"
    "BenchmarkA-8  10  1052 ns/op  2.5 ms/op  5 widgets/op\n"
    "BenchmarkA-8  10  1050 ns/op  2.5 ms/op  5 widgets/op\n"
)
JMH = [
    {
        "benchmark": "a.B",
        "mode": "avgt",
        "primaryMetric": {"score": 1.5, "scoreUnit": "us/op", "rawData": [[1.5]]},
        "secondaryMetrics": {
            "·gc.alloc.rate": {"score": 0.0, "scoreUnit": "MB/sec", "rawData": [[0.0]]},
            "·gc.count": {"score": 0.0, "scoreUnit": "counts", "rawData": [[0.0]]},
            "put": {"score": 2.5, "scoreUnit": "ops/us", "rawData": [[2.5]]},  # of a group
        },
    },
    {"benchmark": "a.C", "mode": "thrpt", "primaryMetric": {"score": "NaN", "scoreUnit": "ops/s"}},
]
SMALLER = {
    "lastUpdate": 1,
    "entries": {
        "s": [
            {
                "commit": {"id": "a" * 40},
                "date": 1760000000000,
                "tool": "customSmallerIsBetter",
                "benches": [{"name": "traffic", "value": "12.5", "unit": "MB/s"}],
            }
        ]
    },
}
# The action of a Go benchmark: its whole line, then each value of it once more.
GO_HISTORY = {
    "lastUpdate": 1,
    "entries": {
        "s": [
            {
                "commit": {"id": "a" * 40},
                "date": 1760000000000,
                "tool": "go",
                "benches": [
                    {"name": "B", "value": 1327, "unit": "ns/op\t   2.41 MB/s\t      24 allocs/op"},
                    {"name": "B - ns/op", "value": 1327, "unit": "ns/op"},
                    {"name": "B - MB/s", "value": 2.41, "unit": "MB/s"},
                    {"name": "B - allocs/op", "value": 24, "unit": "allocs/op"},
                    {"name": "C", "value": 66.5, "unit": "ns/op"},
                ],
            }
        ]
    },
}
JMH_WIDE = [
    {
        "benchmark": "a.B",
        "mode": "thrpt",
        "primaryMetric": {"score": 46.5, "scoreUnit": "ops/s", "rawData": [[4.0, 89.0]]},
    }
]
JULIA_0 = [
    {"Julia": "0.6.4", "BenchmarkTools": "0.3.1"},
    [
        [
            "BenchmarkTools.BenchmarkGroup",
            {
                "tags": [],
                "data": {
                    "gemm": ["BenchmarkTools.Trial", {"times": [1250.0], "memory": 0, "allocs": 0}]
                },
            },
        ]
    ],
]
LLAMA_SQL = (
    "CREATE TABLE IF NOT EXISTS llama_bench (\n  build_commit TEXT\n);\n\nINSERT INTO llama_bench "
    "(build_commit, cpu_info, model_type, n_prompt, n_gen, avg_ts, stddev_ts) VALUES "
    "('8cf427ff', 'x, ''y''', 'llama 7B Q4_0', '512', '0', '7100.002165', '140.34');\n"
)
LLAMA_TABLE = (
    "ggml: found 1 device\n| model | test | t/s |\n| --- | --- | --- |\n| a | pp8 | 2.5 |\n"
)
LLAMA_TABLES = (
    "| model | backend | test | t/s |\r\n| - | - | :-: | -: |\r\n| a | CPU | pp1 | 1.5 |\r\n"
    "| model | ngl | test | t/s |\r\n| - | - | - | -: |\r\n| a | 9 | pp1 | 2.5 ± 0.1 |\r\n"
)
VLLM_LATENCY = {"avg_latency": 1.25, "latencies": [1.25], "percentiles": {"99": 1.3}}
LM_EVAL = {
    "results": {"group": {" ": " ", "alias": "group"}, "arc": {"acc,none": 0.5}},
    "configs": {},
}
K6 = {"root_group": {}, "metrics": {"dropped_iterations": {"count": 0, "rate": 0}}}
K6_LISTED = {
    "config": {"duration": 4.0, "execution": "local", "script": "a.js"},
    "metadata": {},
    "version": "1.0.0",
    "results": {
        "checks": {"metrics": [], "results": []},
        "metrics": [
            {
                "name": "http_req_duration",
                "type": "trend",
                "contains": "time",
                "values": {"med": 1.5},
            },
            {
                "name": "http_reqs",
                "type": "counter",
                "contains": "default",
                "values": {"count": 10},
            },
            {
                "name": "http_req_failed",
                "type": "rate",
                "contains": "default",
                "values": {"matches": 1, "rate": 0.1, "total": 10},
            },
        ],
    },
}
NVBENCH_CSV = (
    "Benchmark,Device,Device Name,M (pow2),M,T,Skipped,Samples,CPU Time (sec),Noise,"
    "GPU Time (sec),Noise,Elem/s (elem/sec),Samples,Batch GPU (sec)\n"
    "copy,0,NVIDIA H200,2^4,16,I32,,100,2e-05,0.5,1.1e-05,0.02,1e9,2000,1.05e-05\n"
    "copy,0,NVIDIA H200,2^40,1099511627776,I32,too large,,,,,,,,\n"
)
# Content, and of each result that is read: name, metric, unit, direction, value (None: it failed).
READ = {
    "colours": (COLOURED, [("fib 20", "time", "us", "lower", 1600.0)]),
    "wrapped name": (CATCH2, [("a long name that is wrapped", "time", "us", "lower", 9e7)]),
    "failed benchmark": (FAILED_CATCH2, [("fib", "time", "us", "lower", None)]),
    "units of go": (
        GO,
        [
            ("BenchmarkA", "time", "us", "lower", 1.051),
            ("BenchmarkA", "ms/op", "us", "lower", 2500.0),
            ("BenchmarkA", "widgets/op", "widgets/op", "higher", 5.0),
        ],
    ),
    "zero rate of a profiler": (
        JMH,
        [
            ("a.B", "time", "us", "lower", 1.5),
            ("a.B", "gc.count", "counts", "lower", 0.0),
            ("a.B", "put", "ops/us", "higher", 2.5),
            ("a.C", "time", "us", "lower", None),
        ],
    ),
    "smaller rate is better": (SMALLER, [("traffic", "throughput", "MB/s", "lower", 12.5)]),
    "history of go": (
        GO_HISTORY,
        [
            ("B", "time", "us", "lower", 1.327),
            ("B", "throughput", "MB/s", "higher", 2.41),
            ("B", "allocs/op", "allocs/op", "lower", 24.0),
            ("C", "time", "us", "lower", 0.0665),
        ],
    ),
    "interval below 0": (JMH_WIDE, [("a.B", "throughput", "ops/s", "higher", 46.5)]),
    "types of julia 0": (
        JULIA_0,
        [
            ("gemm", "time", "us", "lower", 1.25),
            ("gemm", "memory", "bytes", "lower", 0.0),
            ("gemm", "allocs", "allocs", "lower", 0.0),
        ],
    ),
    "two tables": (
        LLAMA_TABLES,
        [
            ("a", "throughput", "tokens/s", "higher", 1.5),
            ("a", "throughput", "tokens/s", "higher", 2.5),
        ],
    ),
    "sql": (LLAMA_SQL, [("llama 7B Q4_0", "throughput", "tokens/s", "higher", 7100.002165)]),
    "table after a log": (LLAMA_TABLE, [("a", "throughput", "tokens/s", "higher", 2.5)]),
    "latency of a batch": (
        VLLM_LATENCY,
        [
            ("serving", "avg_latency", "us", "lower", 1250000.0),
            ("serving", "p99_latency", "us", "lower", 1300000.0),
        ],
    ),
    "group without aggregate": (LM_EVAL, [("arc", "acc", "fraction", "higher", 0.5)]),
    "nvbench as csv": (
        NVBENCH_CSV,
        [
            ("copy", "time", "us", "lower", 11.0),
            ("copy", "time", "us", "lower", 10.5),
            ("copy", "time", "us", "lower", None),
        ],
    ),
    "nothing was dropped": (K6, []),
    "list of k6": (
        K6_LISTED,
        [
            ("http_req_duration", "time", "us", "lower", 1500.0),
            ("http_reqs", "rate", "1/s", "higher", 2.5),
            ("http_req_failed", "rate", "fraction", "lower", 0.1),
        ],
    ),
}


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("compress", [False, True])
def test_legal_content_is_read_and_nothing_is_refused(tmp_path, case, compress):
    content, expected = READ[case]
    if isinstance(content, dict) and "lastUpdate" in content:
        content = f"window.BENCHMARK_DATA={json.dumps(content)}"
    text = content if isinstance(content, str) else json.dumps(content)
    path = tmp_path / "results"
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())

    readings = list(read_results(detect_format(str(path)), str(path)))

    read = [
        (one.name, one.metric, one.unit, one.direction, one.median)
        for reading in readings
        for one in reading.results
    ]
    assert read == expected
    assert not any(reading.refused for reading in readings)


@pytest.mark.parametrize("unit", ["fps", "qps", "Mops", "Gbps", "iops"])
def test_abbreviated_rates_are_ratios_of_which_more_is_better(unit):
    assert is_rate(unit)
    assert scale_of("throughput", unit) == "ratio"


def test_parameters_of_julia_are_no_results(tmp_path):
    path = tmp_path / "tune.json"
    path.write_text(json.dumps([{"Julia": "1.10.2"}, [["Parameters", {"samples": 1}]]]))

    with pytest.raises(UsageError, match="has no trial, perhaps parameters only"):
        list(read_results("julia", str(path)))


LONG = 20_000
# One line each, of which an expression that tries each of its parts again takes seconds.
LONG_LINES = {
    "spaces": f"test x{' ' * LONG}",
    "tabs": "Benchmark 1" + "\t" * LONG,
    "brackets": "M," + "x (" * LONG,
    "slashes": json.dumps(
        {"context": {}, "benchmarks": [{"name": "/" * 5 * LONG, "real_time": 1}]}
    ),
    "jobs": json.dumps(
        {"HostEnvironmentInfo": {}, "Benchmarks": [{"DisplayInfo": "J: x" + " [" * 5 * LONG}]}
    ),
}


@pytest.mark.parametrize("name", LONG_LINES)
def test_long_line_is_refused_at_once(name, tmp_path):
    path = tmp_path / "results"
    path.write_text(f"{LONG_LINES[name]}\n1,2\n")
    began = time.process_time()

    for format_name in FORMATS:
        with suppress(UsageError):
            list(read_results(format_name, str(path)))

    assert time.process_time() - began < 1

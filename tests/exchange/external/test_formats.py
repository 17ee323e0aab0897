"""Every format: its values to the digit, its recognition, and what a second import does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import CommitInfo, Record
from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.formats import FORMATS, detect_format, read_results
from flexq_bench.exchange.external.importing import store_readings
from flexq_bench.exchange.external.records import Origin

FILES = Path(__file__).parent / "files"
COMMIT = CommitInfo("c" * 40, None, None, dirty=False)
# By file: its format, and of some of its results name, variant, shape, metric, unit, better, value.
READ = {
    "data.js": (
        "github-action-benchmark",
        [
            ("fib_20", "Rust", (1, 1, 1), "time", "us", "lower", 24.512),
            ("fib_20", "Rust", (1, 1, 1), "time", "us", "lower", 26.001),
            ("test_fib", "Python", (1, 1, 1), "throughput", "iter/sec", "higher", 41535.29),
            ("cpu load", "Custom", (1, 1, 1), "value", "Percent", "lower", 50.0),
        ],
    ),
    "custom.json": (
        "customSmallerIsBetter",
        [
            ("latency of gemm", "", (1, 1, 1), "time", "us", "lower", 1250.0),
            ("memory", "", (1, 1, 1), "value", "MB", "lower", 812.5),
        ],
    ),
    "hyperfine.json": (
        "hyperfine",
        [
            ("sleep {t}", "t=0.01", (1, 1, 1), "time", "us", "lower", 10702.88),
            ("sleep {t}", "t=0.01", (1, 1, 1), "memory", "bytes", "lower", 1900544.0),
        ],
    ),
    "jmh.json": (
        "jmh",
        [
            ("org.acme.Gemm.multiply", "mode=avgt", (64, 1, 1), "time", "us", "lower", 12.345),
            ("org.acme.Gemm.multiply", "mode=avgt", (64, 1, 1), "gc.alloc.rate.norm", "B/op",
             "lower", 48.002),
            ("org.acme.Gemm.rate", "mode=thrpt", (1, 1, 1), "throughput", "ops/ms", "higher",
             81.25),
        ],
    ),
    "criterion.txt": (
        "criterion",
        [
            ("fib 20", "", (1, 1, 1), "time", "us", "lower", 26.251),
            ("a very long name of a benchmark/w6a8", "4096", (1, 1, 1), "time", "us", "lower",
             1250.3),
            ("a very long name of a benchmark/w6a8", "4096", (1, 1, 1), "throughput", "GiB/s",
             "higher", 3.0516),
        ],
    ),
    "cargo_bench.txt": (
        "criterion",
        [("tests::bench_fib_20", "", (1, 1, 1), "time", "us", "lower", 37.174)],
    ),
    "go.txt": (
        "go",
        [
            ("example.com/gemm.BenchmarkGemm", "procs=8", (8, 4096, 1), "time", "us", "lower",
             0.2845),
            ("example.com/gemm.BenchmarkGemm", "procs=8", (8, 4096, 1), "B/op", "B/op", "lower",
             16.0),
            ("example.com/gemm.BenchmarkGemm", "procs=8", (8, 4096, 1), "allocs/op", "allocs/op",
             "lower", 0.0),
            ("example.com/gemm.BenchmarkCopy", "procs=8", (1, 1, 1), "throughput", "MB/s",
             "higher", 9150.71),
        ],
    ),
    "catch2.xml": (
        "catch2",
        [("Fibonacci 20", "Fibonacci", (1, 1, 1), "time", "us", "lower", 43.1867)],
    ),
    "catch2.txt": (
        "catch2",
        [
            ("Fibonacci 20", "", (1, 1, 1), "time", "us", "lower", 43.186),
            ("a long name with 2 numbers", "", (1, 1, 1), "time", "us", "lower", 1207.5),
        ],
    ),
    "julia.json": (
        "julia",
        [
            ("gemm/64", "", (1, 1, 1), "time", "us", "lower", 1.25),
            ("gemm/64", "", (1, 1, 1), "memory", "bytes", "lower", 96.0),
            ("gemm/64", "", (1, 1, 1), "allocs", "allocs", "lower", 2.0),
        ],
    ),
    "benchmarkdotnet.json": (
        "benchmarkdotnet",
        [
            ("Acme.Gemm.Multiply", "", (1, 100, 1), "time", "us", "lower", 4.1875),
            ("Acme.Gemm.Multiply", "", (1, 100, 1), "Allocated Memory", "B", "lower", 424.0),
        ],
    ),
    "asv/machine/c0ffee12-virtualenv-py3.11.json": (
        "asv",
        [
            ("gemm.time_multiply", "kind=fp16", (64, 1, 1), "time", "us", "lower", 1500.0),
            ("gemm.time_multiply", "kind=fp16", (128, 1, 1), "time", "us", "lower", None),
            ("gemm.track_error", "", (1, 1, 1), "value", "percent", "lower", 1.25),
            ("gemm.peakmem_multiply", "", (1, 1, 1), "value", "bytes", "lower", 41230336.0),
        ],
    ),
    "conbench.json": (
        "conbench",
        [
            ("gemm", "source=nyctaxi", (8, 1, 1), "time", "us", "lower", 99896.0),
            ("read", "compression=snappy", (1, 1, 1), "throughput", "B/s", "higher", 1.5e9),
        ],
    ),
    "k6.json": (
        "k6",
        [
            ("http_req_duration", "", (1, 1, 1), "time", "us", "lower", 117411.5),
            ("http_req_duration", "", (1, 1, 1), "p(95)", "us", "lower", 214600.0),
            ("http_reqs", "", (1, 1, 1), "rate", "1/s", "higher", 8.287),
            ("http_req_failed", "", (1, 1, 1), "rate", "fraction", "lower", 0.0125),
            ("checks", "", (1, 1, 1), "rate", "fraction", "higher", 0.98),
        ],
    ),
    "locust_stats.csv": (
        "locust",
        [
            ("/v1/completions", "POST", (1, 1, 1), "time", "us", "lower", 120000.0),
            ("/v1/completions", "POST", (1, 1, 1), "p99", "us", "lower", 480000.0),
            ("/v1/completions", "POST", (1, 1, 1), "throughput", "requests/s", "higher", 16.61),
            ("/v1/completions", "POST", (1, 1, 1), "failures", "fraction", "lower", 0.005),
        ],
    ),
    "vllm.json": (
        "vllm",
        [
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "median_tpot", "us", "lower", 7671.25),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "p99_ttft", "us", "lower", 98712.5),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "output_throughput", "tokens/s",
             "higher", 1931.5),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "request_throughput", "requests/s",
             "higher", 9.75),
        ],
    ),
    "sglang.jsonl": (
        "sglang",
        [
            ("sglang", None, (1, 1, 1), "median_e2e_latency", "us", "lower", 2154300.0),
            ("sglang", None, (1, 1, 1), "input_throughput", "tokens/s", "higher", 5120.25),
        ],
    ),
    "tensorrt_llm.json": (
        "tensorrt-llm",
        [
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "system_output_throughput_tok_s",
             "tokens/s", "higher", 28390.42),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "avg_tpot", "us", "lower", 11250.0),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "request_latency_percentiles_p99", "us",
             "lower", 2911500.0),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "ttft_percentiles_p99", "us", "lower",
             61250.0),
            ("meta-llama/Llama-3.1-8B", None, (1, 1, 1), "gen_tps_percentiles_p50_tok_s",
             "tokens/s", "higher", 89.25),
        ],
    ),
    **{
        f"llama_bench.{kind}": (
            "llama-bench",
            [
                ("llama 7B Q4_0", None, (1, 1, 1), "throughput", "tokens/s", "higher", value)
                for value in (5765.41, 112.35)
            ],
        )
        for kind in ("json", "jsonl", "csv", "md")
    },
    "results_2026-03-01T10-00-00.000000.json": (
        "lm-eval",
        [
            ("hellaswag", "model=acme/w6a8,shots=0", (1, 1, 1), "acc", "fraction", "higher", 0.6),
            ("wikitext", "model=acme/w6a8,shots=0", (1, 1, 1), "word_perplexity", "points",
             "lower", 11.5231),
        ],
    ),
    "mlperf_log_summary.txt": (
        "mlperf",
        [
            ("PySUT", "Offline", (1, 1, 1), "Samples per second", "samples/s", "higher", 1234.56),
            ("PySUT", "Offline", (1, 1, 1), "99.00 percentile latency", "us", "lower", 5012345.678),
        ],
    ),
    "matmul-performance.csv": (
        "triton",
        [
            ("matmul-performance", "provider=cuBLAS", (256, 256, 256), "throughput", "TFLOPS",
             "higher", 4.096),
            ("matmul-performance", "provider=Triton", (384, 384, 384), "throughput", "TFLOPS",
             "higher", 12.288),
        ],
    ),
    # Written by the tools themselves, of the version in the name.
    "made/hyperfine-1.15.0.json": (
        "hyperfine",
        [("sleep 0.02", "t=0.02", (1, 1, 1), "time", "us", "lower", 27693.076)],
    ),
    "made/go-1.19.8.txt": (
        "go",
        [
            ("example.com/gemm.BenchmarkDot", "procs=2", (1, 64, 1), "time", "us", "lower",
             0.03137),
            ("example.com/gemm.BenchmarkDot", "procs=2", (1, 64, 1), "throughput", "MB/s",
             "higher", 16326.525),
            ("example.com/gemm.BenchmarkAllocate", "procs=2", (1, 1, 1), "B/op", "B/op", "lower",
             4480.0),
        ],
    ),
    "made/go-1.19.8.json": (
        "go",
        [("example.com/gemm.BenchmarkDot", "procs=2", (1, 1024, 1), "time", "us", "lower",
          0.7529)],
    ),
    "made/k6-1.1.0.json": (
        "k6",
        [
            ("http_req_duration", "", (1, 1, 1), "time", "us", "lower", 3635.6905),
            ("http_req_duration", "", (1, 1, 1), "p(95)", "us", "lower", 12126.140950000003),
            ("http_reqs", "", (1, 1, 1), "rate", "1/s", "higher", 299.65047719563233),
            ("data_sent", "", (1, 1, 1), "rate", "B/s", "higher", 21275.183880889897),
        ],
    ),
    "made/k6-1.1.0-handle-summary.json": (
        "k6",
        [
            ("http_req_duration", "expected_response:true", (1, 1, 1), "avg", "us", "lower",
             4938.03885),
            ("http_reqs", "", (1, 1, 1), "rate", "1/s", "higher", 354.47959497586857),
            ("checks", "", (1, 1, 1), "rate", "fraction", "higher", 1.0),
        ],
    ),
    "made/catch2-2.13.10.txt": (
        "catch2",
        [
            ("dot 64", "", (1, 1, 1), "time", "us", "lower", 0.220755),
            ("dot of a very long name which the console must wrap into further lines 4096", "",
             (1, 1, 1), "time", "us", "lower", 14.4711),
        ],
    ),
    "made/catch2-2.13.10.xml": (
        "catch2",
        [("dot 64", "Dot product", (1, 1, 1), "time", "us", "lower", 0.129874)],
    ),
    "made/criterion-0.3.6.txt": (
        "criterion",
        [
            ("dot 64", "", (1, 1, 1), "time", "us", "lower", 0.29238),
            ("dot of a name that is longer than the column/sum", "4096", (1, 1, 1), "throughput",
             "GiB/s", "higher", 1.6317),
        ],
    ),
    "made/triton-3.9.0/matmul-performance.csv": (
        "triton",
        [
            ("matmul-performance", "provider=Triton", (256, 256, 256), "throughput", "TFLOPS",
             "higher", 0.03691),
        ],
    ),
    "made/libtest-1.95.0.txt": (
        "criterion",
        [("tests::dot_4096", "", (1, 1, 1), "time", "us", "lower", 6.94568)],
    ),
    "made/google-benchmark-1.7.1.json": (
        "google-benchmark",
        [
            ("BM_Dot", "repeats=3", (1, 64, 1), "time", "us", "lower", 0.3296808077360329),
            ("BM_Skipped", "", (1, 1, 1), "time", "us", "lower", None),
        ],
    ),
    "made/pytest-benchmark-5.3.1.json": (
        "pytest-benchmark",
        [("test_dot.py::test_dot", "", (1, 256, 1), "time", "us", "lower", 20.293749912525527)],
    ),
    "made/locust-2.47.0.csv": (
        "locust",
        [
            ("/v1/models", "GET", (1, 1, 1), "time", "us", "lower", 14000.0),
            ("/bad", "GET", (1, 1, 1), "failures", "fraction", "lower", 1.0),
        ],
    ),
    "made/asv-0.6.6/worker/a505608e-existing-py_usr_bin_python3.json": (
        "asv",
        [
            ("gemm.Dot.time_dot", "dtype=fp64", (1, 256, 1), "time", "us", "lower",
             14.431199997488873),
        ],
    ),
    "made/benchadapt-2024.3.20.json": (
        "conbench",
        [("gemm", "", (1, 64, 1), "time", "us", "lower", 110000.0)],
    ),
    "made/loadgen-6.0.17.txt": (
        "mlperf",
        [
            ("PySUT", "SingleStream", (1, 1, 1), "90.00 percentile latency", "us", "lower",
             572.608),
            ("PySUT", "SingleStream", (1, 1, 1), "QPS w/o loadgen overhead", "queries/s",
             "higher", 1687.31),
        ],
    ),
    "made/lm-eval-0.4.13/results_2026-11-28T14-16-59.483892.json": (
        "lm-eval",
        [("mine", "model=dummy,shots=0", (1, 1, 1), "acc", "fraction", "higher",
          0.8333333333333334)],
    ),
    **{
        f"made/llama-bench-0.3.36.{kind}": (
            "llama-bench",
            [("llama ?B all F32", None, (1, 1, 1), "throughput", "tokens/s", "higher", value)],
        )
        for kind, value in (
            ("json", 4243.971987), ("jsonl", 1418.250137), ("csv", 374.422247), ("md", 1254.63),
            ("sql", 1683.810567),
        )
    },
    "made/vllm-0.32.0.json": (
        "vllm",
        [
            ("tiny-llama", None, (1, 1, 1), "median_ttft", "us", "lower", 155221.973001062),
            ("tiny-llama", None, (1, 1, 1), "output_throughput", "tokens/s", "higher",
             31.839047184985315),
        ],
    ),
    "made/sglang-0.5.23.jsonl": (
        "sglang",
        [
            ("vllm", None, (1, 1, 1), "p95_itl", "us", "lower", 119946.6207004661),
            ("vllm", None, (1, 1, 1), "request_throughput", "requests/s", "higher",
             7.120763051190357),
        ],
    ),
    "history.csv": (
        "csv",
        [("gemm", "", (8, 4096, 4096), "time", "us", "lower", 21.4)],
    ),
    "history.jsonl": (
        "jsonl",
        [("gemm", "", (8, 4096, 4096), "time", "us", "lower", 21.4)],
    ),
}  # fmt: skip


def results_of(format_name, path):
    return [one for part in read_results(format_name, str(path)) for one in part.results]


@pytest.mark.parametrize("name", READ)
def test_values_have_the_digits_unit_and_direction_of_the_file(name):
    format_name, expected = READ[name]

    parts = list(read_results(format_name, str(FILES / name)))

    found = [
        (r.name, r.variant, r.shape, r.metric, r.unit, r.direction, r.median)
        for part in parts
        for r in part.results
    ]
    assert [one for part in parts for one in part.refused] == []
    for one in expected:
        known = [(*f[:1], one[1] if one[1] is None else f[1], *f[2:]) for f in found]
        assert one in known


def test_every_format_has_a_file():
    elsewhere = {"nvbench", "google-benchmark", "pytest-benchmark", "customBiggerIsBetter"}

    assert {format_name for format_name, _ in READ.values()} | elsewhere == set(FORMATS)


@pytest.mark.parametrize("name", READ)
def test_format_is_recognized_by_content(name, tmp_path):
    format_name, _ = READ[name]
    copy = tmp_path / "any.name"
    copy.write_bytes((FILES / name).read_bytes())

    if format_name == "customSmallerIsBetter":
        with pytest.raises(UsageError, match="which way is better: give --format custom"):
            detect_format(str(copy))
    else:
        assert detect_format(str(copy)) == format_name


@pytest.mark.parametrize("name", ["google_benchmark.json", "pytest_benchmark.json"])
def test_files_of_python_tools_are_recognized(name):
    assert detect_format(str(FILES.parent / name)) == name.partition(".")[0].replace("_", "-")


@pytest.mark.parametrize("text", ["", "hello", "{}", "[1]", "a,b\n1,2\n"])
def test_unknown_content_is_no_format(tmp_path, text):
    (tmp_path / "a").write_text(text)

    with pytest.raises(UsageError, match="is of no known format: give --format, one of nvbench"):
        detect_format(str(tmp_path / "a"))


def stored(database):
    with database.session() as session:
        return {
            (one.case, one.commit.sha, one.extra.get("occasion")): one.median_us
            for one in queries.stored_records(session, Record, queries.Filters())
        }


@pytest.fixture
def put(tmp_path):
    """put("csv", path, occasion=…): imports a file; gives the numbers of new and replaced ones."""
    with open_database(str(tmp_path / "a.sqlite")) as database:

        def imported(format_name, path, commit=COMMIT, **of):
            origin = Origin("acme", commit, **of)
            done = store_readings(
                database,
                read_results(format_name, str(path)),
                origin,
                lambda commits: {one.sha: one for one in commits},
            )
            assert done.refused == []
            return done.added, done.replaced

        imported.database = database
        yield imported


@pytest.mark.parametrize("name", READ)
def test_repeated_file_changes_nothing_and_a_corrected_one_replaces(name, put, tmp_path):
    format_name, _ = READ[name]
    path = tmp_path / Path(name).name
    text = (FILES / name).read_text()
    path.write_text(text)
    results = results_of(format_name, path)

    assert put(format_name, path) == (len(results), 0)
    assert put(format_name, path) == (0, 0)
    before = stored(put.database)
    path.write_text(text.replace(*CORRECTED[name]))
    added, replaced = put(format_name, path)

    after = stored(put.database)
    assert (added, after.keys()) == (0, before.keys())
    assert replaced >= 1
    assert sum(after[key] != before[key] for key in before) >= 1


CORRECTED = {
    "data.js": ("24512", "24513"),
    "custom.json": ("812.5", "813.5"),
    "hyperfine.json": ("0.01070288", "0.01070299"),
    "jmh.json": ('"score" : 12.345', '"score" : 12.346'),
    "criterion.txt": ("26.251", "26.252"),
    "cargo_bench.txt": ("37,174", "37,175"),
    "go.txt": ("284.5 ns/op", "285.5 ns/op"),
    "catch2.xml": ("43186.7", "43187.7"),
    "catch2.txt": ("43.186 us", "43.187 us"),
    "julia.json": ("1250.0", "1251.0"),
    "benchmarkdotnet.json": ('"Median": 4187.5', '"Median": 4187.75'),
    "asv/machine/c0ffee12-virtualenv-py3.11.json": ("0.0015,", "0.0016,"),
    "conbench.json": ("0.099896", "0.099897"),
    "k6.json": ("117.4115", "117.4116"),
    "locust_stats.csv": ("16.61", "16.62"),
    "vllm.json": ("7.67125", "7.67126"),
    "sglang.jsonl": ("2154.3", "2154.4"),
    "tensorrt_llm.json": ("28390.42", "28390.43"),
    "llama_bench.json": ('"avg_ts": 112.35', '"avg_ts": 112.36'),
    "llama_bench.jsonl": ('"avg_ts": 112.35', '"avg_ts": 112.36'),
    "llama_bench.csv": ("112.35", "112.36"),
    "llama_bench.md": ("112.35", "112.36"),
    "results_2026-03-01T10-00-00.000000.json": ("11.5231", "11.5232"),
    "mlperf_log_summary.txt": ("1234.56", "1234.57"),
    "matmul-performance.csv": ("12.288", "12.289"),
    "made/hyperfine-1.15.0.json": ("0.027693076", "0.027693077"),
    "made/go-1.19.8.txt": ("30.90 ns/op", "30.92 ns/op"),
    "made/go-1.19.8.json": ("752.9 ns/op", "753.9 ns/op"),
    "made/k6-1.1.0.json": ("299.65047719563233", "299.75047719563233"),
    "made/k6-1.1.0-handle-summary.json": ("354.47959497586857", "354.57959497586857"),
    "made/catch2-2.13.10.txt": ("14.4711 us", "14.4712 us"),
    "made/catch2-2.13.10.xml": ("129.874", "129.875"),
    "made/criterion-0.3.6.txt": ("292.38 ns", "292.39 ns"),
    "made/triton-3.9.0/matmul-performance.csv": ("0.036910", "0.036911"),
    "made/libtest-1.95.0.txt": ("6,945.68", "6,945.69"),
    "made/google-benchmark-1.7.1.json": ("3.2968080773603293e+02", "3.3968080773603293e+02"),
    "made/pytest-benchmark-5.3.1.json": ("2.0293749912525527e-05", "2.0393749912525527e-05"),
    "made/locust-2.47.0.csv": ("48.2120036040841", "49.2120036040841"),
    "made/asv-0.6.6/worker/a505608e-existing-py_usr_bin_python3.json": (
        "1.4431199997488874e-05", "1.5431199997488874e-05",
    ),
    "made/benchadapt-2024.3.20.json": ("0.11", "0.115"),
    "made/loadgen-6.0.17.txt": ("1687.31", "1688.31"),
    "made/lm-eval-0.4.13/results_2026-11-28T14-16-59.483892.json": (
        '"acc,none": 0.8333333333333334', '"acc,none": 0.8433333333333334',
    ),
    "made/llama-bench-0.3.36.json": ("4243.971987", "4243.971988"),
    "made/llama-bench-0.3.36.jsonl": ("1418.250137", "1418.250138"),
    "made/llama-bench-0.3.36.csv": ("374.422247", "374.422248"),
    "made/llama-bench-0.3.36.md": ("1254.63 ", "1254.64 "),
    "made/llama-bench-0.3.36.sql": ("1683.810567", "1683.810568"),
    "made/vllm-0.32.0.json": ("31.839047184985315", "31.939047184985315"),
    "made/sglang-0.5.23.jsonl": ("7.120763051190357", "7.220763051190357"),
    "history.csv": ("21.4", "21.5"),
    "history.jsonl": ("21.4", "21.5"),
}  # fmt: skip


# Quality data


def remarks_of(format_name, name):
    return {remark for one in results_of(format_name, FILES / name) for remark in one.remarks}


def test_what_makes_results_less_comparable_is_remarked():
    assert remarks_of("mlperf", "mlperf_log_summary.txt") == {
        "LoadGen's rules make it INVALID (Min duration not satisfied)"
    }
    assert remarks_of("vllm", "vllm.json") == {"3 requests failed"}
    assert remarks_of("hyperfine", "hyperfine.json") == {"the command failed in some of its runs"}
    assert remarks_of("k6", "k6.json") == {"the threshold p(95)<200 was crossed"}


def test_llama_bench_has_the_same_series_in_each_output():
    made = FILES / "made"
    series = [
        {r.variant for r in results_of("llama-bench", made / f"llama-bench-0.3.36.{kind}")}
        for kind in ("json", "jsonl", "csv", "sql")
    ]

    assert len(series[0]) == 2
    assert all(one == series[0] for one in series)


def test_llama_bench_names_a_setting_that_is_not_the_default(tmp_path):
    row = json.loads((FILES / "made/llama-bench-0.3.36.json").read_text())[0]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([row, row | {"n_cpu_moe": 8}]))

    usual, other = results_of("llama-bench", path)

    assert "n_cpu_moe" not in usual.variant
    assert other.variant == f"{usual.variant},n_cpu_moe=8"


def test_trtllm_bench_names_the_device():
    assert {r.device for r in results_of("tensorrt-llm", FILES / "tensorrt_llm.json")} == {
        "NVIDIA H200"
    }


def test_go_counts_are_the_median_of_their_lines():
    lines = (FILES / "go.txt").read_text()
    (one,) = [
        r for r in results_of("go", FILES / "go.txt") if r.metric == "time" and "Copy" in r.name
    ]

    assert lines.count("BenchmarkCopy") == 3
    assert (one.samples, one.median) == ((0.112, 0.111, 0.115), 0.112)


def test_go_events_are_the_output_they_contain(tmp_path):
    lines = (FILES / "go.txt").read_text().splitlines(keepends=True)
    # The name of a benchmark is printed before it runs, the rest of the line after it.
    parts = [part for line in lines for part in line.partition("\t") if part]
    events = [{"Action": "output", "Package": "p", "Output": part} for part in parts]
    (tmp_path / "go.json").write_text("\n".join(map(json.dumps, events)))

    found = results_of("go", tmp_path / "go.json")

    assert found == results_of("go", FILES / "go.txt")


def test_lm_eval_has_the_values_of_each_question_in_order():
    (one,) = [
        r
        for r in results_of("lm-eval", FILES / "results_2026-03-01T10-00-00.000000.json")
        if r.metric == "acc"
    ]

    assert one.samples == (1.0, 0.0, 1.0, 0.0, 1.0)
    assert one.extra["questions"]
    assert one.low == pytest.approx(0.6 - 1.96 * 0.2449)


def test_lm_eval_names_the_model_and_bounds_a_share():
    """Of a model without arguments, lm-eval writes a random name."""
    file = "made/lm-eval-0.4.13/results_2026-11-28T14-16-59.483892.json"
    one = results_of("lm-eval", FILES / file)[0]

    assert '"model_name": "qdpv68r5"' in (FILES / file).read_text()
    assert (one.high, one.extra["git_hash"]) == (1.0, "")
    assert one.low == pytest.approx(0.8333 - 1.96 * 0.1667, abs=1e-3)
    assert one.samples.count(1.0) == 5


def test_asv_keeps_intervals_and_quartiles():
    of_times = [r for r in results_of("asv", FILES / "made/asv-0.6.6") if r.unit == "us"]

    assert of_times[-1].extra["stats_ci_99_a"] == 1.223e-05
    assert of_times[-1].n_samples == 3


def test_asv_folder_has_all_its_commits_and_machines():
    (reading,) = read_results("asv", str(FILES / "asv"))

    assert detect_format(str(FILES / "asv")) == "asv"
    assert {one.commit.sha for one in reading.results} == {"c0ffee12" + "0" * 32}


def test_history_of_github_action_benchmark_has_its_commits():
    (reading,) = read_results("github-action-benchmark", str(FILES / "data.js"))

    commits = {one.commit.sha: one.commit for one in reading.results}
    assert len(commits) == 2
    assert commits["a" * 40].subject == "Faster fib"
    assert {one.created_at for one in reading.results} == {
        "2026-01-02T03:04:05+00:00",
        "2026-01-03T03:04:05+00:00",
    }
    assert reading.results[0].extra == {"range": "± 1312"}


# Identity


def rows(*values, header="benchmark,value,commit,time"):
    return "\n".join([header, *values, ""])


def test_file_of_many_commits_is_stored_at_each(put, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        rows(
            *(f"gemm,{20 + day},{day:040x},2026-01-{day:02}T00:00:00Z,next,H200" for day in (1, 2)),
            header="benchmark,value,commit,time,branch,device",
        )
    )

    assert put("csv", path, commit=None) == (2, 0)
    with put.database.session() as session:
        found = list(queries.stored_records(session, Record, queries.Filters()))
    assert [(r.commit.sha, r.created_at, r.commit.branch, r.gpu, r.median_us) for r in found] == [
        (f"{day:040x}", f"2026-01-{day:02}T00:00:00+00:00", "next", "H200", 20 + day)
        for day in (1, 2)
    ]


def test_same_commit_replaces_unless_its_occasion_differs(put, tmp_path):
    path = tmp_path / "a.csv"

    def value(text, **of):
        path.write_text(f"benchmark,value\ngemm,{text}\n")
        return put("csv", path, **of)

    assert value(1) == (1, 0)
    assert value(2) == (0, 1)
    assert value(3, occasion="second") == (1, 0)
    assert value(3, occasion="second") == (0, 0)
    assert sorted(stored(put.database).values()) == [2, 3]


def test_another_time_in_the_file_is_another_occasion(put, tmp_path):
    path = tmp_path / "a.csv"
    row = f"gemm,1,{'a' * 40},2026-01-0"
    path.write_text(rows(f"{row}1"))

    assert put("csv", path) == (1, 0)
    path.write_text(rows(f"{row}1", f"{row}2"))
    assert put("csv", path) == (1, 0)


def test_corrected_unit_replaces_the_refused_and_keeps_the_others(put, tmp_path):
    path = tmp_path / "a.csv"
    good = ["a,1,us", "b,2,us", "c,3,us"]
    path.write_text(rows(*good, "d,4,fortnights", header="benchmark,value,unit"))
    (part,) = read_results("csv", str(path))
    done = store_readings(put.database, [part], Origin("acme", COMMIT), lambda _: {})
    path.write_text(rows(*good, "d,4,usec", header="benchmark,value,unit"))

    assert (done.added, len(done.refused)) == (3, 1)
    assert put("csv", path) == (1, 0)
    assert len(stored(put.database)) == 4


def test_result_moves_to_another_series_if_its_direction_was_wrong(put, tmp_path):
    path = tmp_path / "a.csv"
    header = "benchmark,value,metric,unit,direction"
    path.write_text(rows("gemm,5,rate,points,lower", header=header))
    put("csv", path)
    path.write_text(rows("gemm,5,rate,points,higher", header=header))

    assert put("csv", path) == (0, 1)
    with put.database.session() as session:
        (one,) = queries.stored_records(session, Record, queries.Filters())
    assert one.direction == "higher"


def test_rows_without_a_commit_are_refused_where_others_have_one(put, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(rows(f"gemm,1,{'a' * 40},", "other,2,,", "third,3,v1.2,"))
    readings = read_results("csv", str(path))

    done = store_readings(
        put.database, readings, Origin("acme"), lambda some: {one.sha: one for one in some}
    )

    assert done.added == 1
    assert [one.reason for one in done.refused] == [
        "its commit 'v1.2' is no hexadecimal sha",
        "it names no commit: give --commit",
    ]

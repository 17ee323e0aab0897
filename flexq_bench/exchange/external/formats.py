"""Registry of import formats: how a file of each is read, and recognized by its content."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external import (
    asv,
    benchmark_dotnet,
    catch2,
    conbench,
    criterion,
    csv_results,
    github_action_benchmark,
    go_benchmark,
    google_benchmark,
    hyperfine,
    jmh,
    julia,
    k6,
    llama_bench,
    lm_eval,
    locust,
    mlperf,
    nvbench,
    pytest_benchmark,
    serving_benchmark,
    triton_csv,
)
from flexq_bench.exchange.external.result import COLOUR, MAX_BYTES, Reading, read_value
from flexq_bench.runs.text_files import text_lines

_HEAD = 200  # lines, of a file whose format is asked for
_HEADER = 4096  # letters of its first line


@dataclass(frozen=True, slots=True)
class _Content:
    """The beginning of a file. keys: of the object that it is, or that a list or line has first."""

    head: str
    value: Any
    keys: frozenset[str]

    @property
    def header(self) -> str:
        return self.head.partition("\n")[0]


def _keys(*names: str) -> Callable[[_Content], bool]:
    return lambda content: content.keys >= set(names)


def _any_keys(*sets: tuple[str, ...]) -> Callable[[_Content], bool]:
    return lambda content: any(content.keys >= set(names) for names in sets)


def _text(pattern: str) -> Callable[[_Content], bool]:
    return lambda content: re.search(pattern, content.head, re.MULTILINE) is not None


def _header(pattern: str) -> Callable[[_Content], bool]:
    return lambda content: re.search(pattern, content.header[:_HEADER]) is not None


def _has_commands(content: _Content) -> bool:
    results = content.value.get("results") if isinstance(content.value, dict) else None
    return isinstance(results, list) and "command" in (results[0] if results else ())


def _is_column_of_both(content: _Content) -> bool:
    columns = {cell.strip(' "\r').lower() for cell in re.split("[,;\t]", content.header)}
    return columns >= {"benchmark", "value"}


Read = Callable[[str], Reading]
# By name: how a file is read as a whole, and how its content is recognized.
_WHOLE: dict[str, tuple[Read, Callable[[_Content], bool]]] = {
    "nvbench": (
        nvbench.read,
        lambda content: (
            content.keys >= {"devices", "benchmarks"}
            or content.header.startswith(nvbench.CSV_HEADER)
        ),
    ),
    "google-benchmark": (google_benchmark.read, _keys("context", "benchmarks")),
    "pytest-benchmark": (pytest_benchmark.read, _keys("machine_info", "benchmarks")),
    "github-action-benchmark": (
        github_action_benchmark.read,
        lambda content: (
            content.head.startswith("window.BENCHMARK_DATA")
            or content.keys >= {"entries", "lastUpdate"}
        ),
    ),
    "customSmallerIsBetter": (
        partial(github_action_benchmark.read_custom, higher=False),
        lambda _: False,  # the file does not say which way is better
    ),
    "customBiggerIsBetter": (
        partial(github_action_benchmark.read_custom, higher=True),
        lambda _: False,
    ),
    "hyperfine": (hyperfine.read, _has_commands),
    "jmh": (jmh.read, _keys("benchmark", "primaryMetric")),
    "benchmarkdotnet": (benchmark_dotnet.read, _keys("HostEnvironmentInfo", "Benchmarks")),
    "julia": (julia.read, _keys("Julia", "BenchmarkTools")),
    "asv": (asv.read, _keys("commit_hash", "results")),
    "conbench": (conbench.read, _keys("stats", "tags")),
    "k6": (
        k6.read,
        _any_keys(("metrics", "root_group"), ("config", "metadata", "results", "version")),
    ),
    "lm-eval": (lm_eval.read, _keys("results", "configs")),
    "llama-bench": (
        llama_bench.read,
        lambda content: (
            content.keys >= {"model_type", "avg_ts"}
            or _text(r"^\|.*\|\s*t/s\s*\|")(content)
            or {"model_type", "avg_ts"} <= set(content.header.replace('"', "").split(","))
            or "INSERT INTO llama_bench (" in content.head
        ),
    ),
    "tensorrt-llm": (serving_benchmark.read, _keys("engine", "performance")),
    "sglang": (
        serving_benchmark.read,
        _any_keys(
            ("mean_e2e_latency_ms", "request_throughput"), ("prefill_latency", "overall_throughput")
        ),
    ),
    "vllm": (
        serving_benchmark.read,
        _any_keys(
            ("mean_ttft_ms", "request_throughput"),
            ("avg_latency", "percentiles"),
            ("requests_per_second", "tokens_per_second"),
        ),
    ),
    "mlperf": (mlperf.read, _text(f"^{mlperf.TITLE}")),
    "locust": (
        locust.read,
        _header(f'^"?{locust.HEADER.replace(",", chr(34) + "?," + chr(34) + "?")}'),
    ),
    "criterion": (
        criterion.read,
        lambda content: (
            "reason" in content.keys
            or _text(r"time: +\[[\d.]+ \S+ [\d.]+ \S+ [\d.]+ \S+\]|^test .* bench: ")(content)
        ),
    ),
    "go": (
        go_benchmark.read,
        lambda content: (
            content.keys >= {"Action", "Package"}  # of test2json
            or _text(r"^Benchmark\S*\s+\d+\s+\S+ \S+/op")(content)
        ),
    ),
    "catch2": (
        catch2.read,
        _text(r"^<Catch|<BenchmarkResults |^benchmark name +samples +iterations"),
    ),
    "triton": (triton_csv.read, _header(r"^[^()]+,[^,]+ \([^,]+\)\"?(,|$)")),
}
_IN_PARTS: dict[str, tuple[Callable[[str], Iterator[Reading]], Callable[[_Content], bool]]] = {
    "csv": (csv_results.read_csv, _is_column_of_both),
    "jsonl": (csv_results.read_json_lines, _keys("benchmark", "value")),
}
READ_IN_PARTS = tuple(_IN_PARTS)
FORMATS = (*_WHOLE, *READ_IN_PARTS)


def read_results(format_name: str, path: str) -> Iterator[Reading]:
    """Read the results of a file, in parts that fit into memory; there is at least one.

    Raises UsageError if the file is of another format, KeyError for an unknown format.
    """
    if format_name in _IN_PARTS:
        yield from _IN_PARTS[format_name][0](path)
        return
    try:
        reading = _WHOLE[format_name][0](path)
    except csv.Error as error:
        raise UsageError(f"{path}: {error}") from None
    reasons = {entry.reason for entry in reading.refused}
    if not reading.results and len(reading.refused) > 1 and len(reasons) == 1:
        raise UsageError(
            f"{path}: none of its {len(reading.refused)} results can be read, {reasons.pop()}: "
            f"is it a file of {format_name}?"
        )
    yield reading


def detect_format(path: str) -> str:
    """Return the format of a file by its content. Raises UsageError if it is none of them."""
    if Path(path).is_dir():
        is_criterion = next(Path(path).rglob("new/benchmark.json"), None) is not None
        return "criterion" if is_criterion else "asv"
    content = _content(path)
    for name, (_, recognizes) in (*_WHOLE.items(), *_IN_PARTS.items()):
        if recognizes(content):
            return name
    if content.keys >= {"name", "unit", "value"}:
        raise UsageError(
            f"{path} does not say which way is better: give --format customSmallerIsBetter or "
            "customBiggerIsBetter"
        )
    raise UsageError(f"{path} is of no known format: give --format, one of {', '.join(FORMATS)}")


def _content(path: str) -> _Content:
    lines = text_lines(path, "a file of results", most_bytes=1 << 30, longest=MAX_BYTES)
    head = COLOUR.sub("", "".join(line for line, _ in zip(lines, range(_HEAD), strict=False)))
    first = head.partition("\n")[0]
    value: Any = None
    if head.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):  # JSON lines
            value = json.loads(first)
        if value is None:
            with suppress(UsageError):
                value = read_value(path, "a file of results")
    entry = value[0] if isinstance(value, list) and value else value
    return _Content(head, value, frozenset(entry) if isinstance(entry, dict) else frozenset())

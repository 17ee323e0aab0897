"""Google Benchmark: the file of `--benchmark_out=FILE --benchmark_out_format=json`.

The format is described in its user guide (github.com/google/benchmark, docs/user_guide.md, "Output
Formats"): an object `context` and a list `benchmarks` of iterations and aggregates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from flexq_bench.exchange.external.result import (
    BadResult,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    count,
    in_us,
    iso_time,
    kept,
    list_of,
    of_samples,
    read_json,
    split_parameters,
)

_WHAT = "a Google Benchmark file: --benchmark_out=FILE --benchmark_out_format=json"
_OLD_AGGREGATES = ("mean", "median", "stddev")
_FIELDS = {
    "name", "family_index", "per_family_instance_index", "run_name", "run_type", "repetitions",
    "repetition_index", "threads", "iterations", "real_time", "cpu_time", "time_unit", "label",
    "aggregate_name", "aggregate_unit",
}  # of a run; others are counters  # fmt: skip
_SLASH = "\0"  # in place of one that separates nothing
_CENTRES = ("median", "mean")  # aggregates that are times, in order of preference


def read(path: str) -> Reading:
    """Read real times by benchmark and arguments: the median of repetitions, else of aggregates.

    Named arguments (`BM_gemm/m:1/n:64`) are the shape if they are called m, n and k. Other
    aggregates, complexities and their errors are ignored, because they are not times. Raises
    UsageError if the file is not of this format.
    """
    file = read_json(path, _WHAT)
    context = file.get("context")
    fields = context if isinstance(context, dict) else {}
    by_name: dict[str, list[Any]] = {}
    for position, entry in enumerate(_typed(list_of(file, "benchmarks", path, _WHAT)), start=1):
        name = _name(entry) if isinstance(entry, dict) else ""
        by_name.setdefault(name or f"benchmark {position}", []).append(entry)
    entries, created_at = _entries(by_name, fields), iso_time(fields.get("date"))
    return collect(entries, created_at=created_at, machine=_machine(fields))


def _machine(context: Mapping[str, Any]) -> str:
    """Describe the host: its name, and the number and clock of its CPUs; empty: not in the file.

    No name of a device: the context has no model of the CPU, and a container's host name differs
    from run to run.
    """
    host, cpus, mhz = (context.get(key) for key in ("host_name", "num_cpus", "mhz_per_cpu"))
    parts = [f"host {cleaned(host)}"] if isinstance(host, str) and cleaned(host) else []
    if isinstance(cpus, int):
        parts.append(f"{cpus} CPUs" + (f" of {mhz} MHz" if isinstance(mhz, int) else ""))
    return ", ".join(parts)


def _typed(entries: Sequence[Any]) -> list[Any]:
    """Return entries with their run types, which old versions do not write.

    In old versions an aggregate has the name of its benchmark with the suffix `_mean`, `_median` or
    `_stddev`, and a benchmark has all three or none.
    """
    names = {_name(entry) for entry in entries if isinstance(entry, dict)}
    typed = []
    for entry in entries:
        stem, _, suffix = _name(entry).rpartition("_") if isinstance(entry, dict) else ("", "", "")
        aggregates = {f"{stem}_{aggregate}" for aggregate in _OLD_AGGREGATES}
        if "run_type" in (entry if isinstance(entry, dict) else ()) or not aggregates <= names:
            typed.append(entry)
        else:
            kind = {"run_type": "aggregate", "run_name": stem, "aggregate_name": suffix}
            typed.append({**entry, **kind} if suffix in _OLD_AGGREGATES else entry)
    return typed


def _name(entry: Mapping[str, Any]) -> str:
    name = entry.get("run_name", entry.get("name"))
    return name if isinstance(name, str) else ""


def _entries(
    by_name: Mapping[str, Sequence[Any]], context: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], ExternalResult | None]]]:
    for name, entries in by_name.items():
        yield name, partial(_result, name, entries, context)


def _result(
    name: str, entries: Sequence[Mapping[str, Any]], context: Mapping[str, Any]
) -> ExternalResult | None:
    if not all(_name(e) for e in entries):
        raise BadResult("it has no name")
    stem, parameters = _split(name)
    shape, variant = split_parameters(parameters)
    environment = {
        "tool": "google-benchmark",
        "tool_version": cleaned(context.get("library_version", "")),
        "build": cleaned(context.get("library_build_type", "")),
    }
    common: dict[str, Any] = {
        "name": stem, "variant": variant, "shape": shape, "remarks": _remarks(context),
    }  # fmt: skip
    failed = [e for e in entries if e.get("error_occurred") or e.get("skipped")]
    if failed:
        reason = failed[0].get("error_message") or failed[0].get("skip_message") or "it failed"
        return ExternalResult(
            **common, median=None, detail=cleaned(reason), environment=environment
        )
    runs = [e for e in entries if e.get("run_type", "iteration") == "iteration"]
    if runs:
        times = tuple(in_us(e["real_time"], e.get("time_unit", "ns"), "real_time") for e in runs)
        # A single repetition is an average over its iterations, without an interval.
        median, low, high = of_samples(times) if len(times) > 1 else (times[0], None, None)
        repetitions = [e.get("repetition_index") for e in runs]
        has_repetitions = set(map(str, repetitions)) != {"None"}  # old versions do not
        if len(times) > 1 and has_repetitions and len(set(map(str, repetitions))) != len(times):
            raise BadResult("there is another result of this name and these parameters")
        iterations = [count(e.get("iterations", 0), "iterations") for e in runs]
        return ExternalResult(
            **common,
            median=median,
            low=low,
            high=high,
            samples=times,
            n_samples=len(times),
            environment=environment | {"statistic": "median" if len(times) > 1 else "mean"},
            extra={"iterations": iterations, "counters": _counters(runs)},
        )
    for centre in _CENTRES:
        for entry in entries:
            if entry.get("aggregate_name") == centre:
                time = in_us(entry["real_time"], entry.get("time_unit", "ns"), "real_time")
                n_repetitions = count(entry.get("repetitions", 0), "repetitions")
                return ExternalResult(
                    **common,
                    median=time,
                    n_samples=n_repetitions,
                    environment=environment | {"statistic": centre},
                )
    return None  # a complexity (BigO, RMS), or only deviations


def _remarks(context: Mapping[str, Any]) -> tuple[str, ...]:
    scaled = ("the clock of the CPU varied: CPU scaling was enabled",)
    debug = ("the benchmark library is a debug build: times are longer",)
    return (scaled if context.get("cpu_scaling_enabled") else ()) + (
        debug if context.get("library_build_type") == "debug" else ()
    )


def _counters(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the benchmark counted: each counter, with its value in each run."""
    names = dict.fromkeys(name for run in runs for name in run if name not in _FIELDS)
    values = {name: [run.get(name) for run in runs] for name in names}
    counters: dict[str, Any] = kept(values)
    return counters


def _split(name: str) -> tuple[str, dict[str, object]]:
    """Split `BM_gemm<half>/m:1/64/threads:8` into its stem and parameters: m, `arg1`, threads.

    Slashes within template arguments are part of the stem.
    """
    *before, last = name.split(">")
    inner = [f"{head}{sign}{tail.replace('/', _SLASH)}"
             for head, sign, tail in (part.rpartition("<") for part in before)]  # fmt: skip
    stem, *parts = (part.replace(_SLASH, "/") for part in ">".join([*inner, last]).split("/"))
    parameters: dict[str, object] = {}
    for position, part in enumerate(parts):
        key, colon, value = part.partition(":")
        if colon:
            parameters[key] = value
        elif re.fullmatch(r"-?[0-9]+", part):
            parameters[f"arg{position}"] = part
        else:
            parameters[part] = "true"  # real_time, manual_time, process_time
    return stem, parameters

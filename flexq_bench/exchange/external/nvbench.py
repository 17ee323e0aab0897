"""nvbench (C++) and cuda-bench (Python): the file of `--json` or `--jsonbin`, or of `--csv`.

It is read as cuda-bench's own `cuda.bench.results` reads it: devices, benchmarks, their states, and
the summaries of each state by tag. Numbers are text, times are in seconds.
"""

from __future__ import annotations

import array
import csv
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    MAX_BYTES,
    MAX_SAMPLES,
    BadResult,
    ExternalResult,
    Reading,
    cleaned,
    collect,
    count,
    kept,
    list_of,
    notches,
    number,
    of_samples,
    read_json,
    scaled,
    split_parameters,
)
from flexq_bench.runs.text_files import text_lines

_WHAT = "an nvbench file: the benchmark's --json FILE"
_FORM = 1  # major version of nvbench's JSON
_US = 1e6  # microseconds in a second
_LOW_CLOCK = 0.95  # share of the default clock; below it, times are of a slower device
_Z_95 = 1.96  # half-width of a 95 % interval in standard errors
_NOT_FINITE = ("inf", "-inf", "nan", "-nan", "Infinity", "NaN")  # in text form
# Our cache mode, and the stem of nvbench's tags. `cold` clears the L2 before each launch.
CSV_HEADER = "Benchmark,Device,Device Name,"
_AFTER_AXES = ("Skipped", "Samples", "CPU Time (sec)", "GPU Time (sec)")  # columns
_CSV_TIMES = (("cold", "GPU Time (sec)"), ("hot", "Batch GPU (sec)"), ("", "CPU Time (sec)"))
_MODES = (("cold", "nv/cold"), ("hot", "nv/batch"), ("", "nv/cpu_only"))


def read(path: str) -> Reading:
    """Read GPU times (of CPU-only benchmarks: CPU times) by benchmark, axes and device.

    `cold` times are of isolated launches, `hot` times of batches of launches. If several devices
    have the same name, only the first is read, because a series is of one kind of device. The value
    is the median of the raw samples if the file has them, else nvbench's median, else its mean; the
    environment contains which of them. A skipped state becomes a failed result with its reason.
    Raises UsageError if the file is not of this format.
    """
    if next(text_lines(path, _WHAT, most_bytes=MAX_BYTES), "").startswith(CSV_HEADER):
        return _read_csv(path)
    file = read_json(path, _WHAT)
    _check_form(file, path)
    devices = {d.get("id"): d for d in file.get("devices") or () if isinstance(d, dict)}
    version = _version(file)
    benchmarks = list_of(file, "benchmarks", path, _WHAT)
    folder = Path(path).resolve().parent
    refused_devices = _others_of_a_kind(benchmarks, devices)
    entries = _states(benchmarks, devices, version, folder, refused_devices.keys())
    refused = (
        (f"device {number}", partial(_refuse, reason)) for number, reason in refused_devices.items()
    )
    return collect(chain(entries, refused))


def _read_csv(path: str) -> Reading:
    """Read the mean times of the rows of `--csv`, whose cells nvbench does not quote."""
    header, *rows = csv.reader(text_lines(path, _WHAT, most_bytes=MAX_BYTES))
    first = next((place for place, name in enumerate(header) if name in _AFTER_AXES), len(header))
    return collect(
        (f"row {number}", partial(_of_row, header, first, row))
        for number, row in enumerate(rows, start=2)
    )


def _of_row(header: Sequence[str], first: int, row: Sequence[str]) -> list[ExternalResult]:
    """Return the results of a row. first: place of the first column that is no axis."""
    if len(row) != len(header):
        raise BadResult("a cell of it has a comma: write --json")
    axes = dict(zip(header[3:first], row[3:first], strict=True))
    shape, variant = split_parameters(
        {name: value for name, value in axes.items() if not name.endswith(" (pow2)")}
    )
    common: dict[str, Any] = {
        "name": row[0], "variant": variant, "shape": shape, "device": row[2],
        "environment": {"tool": "nvbench", "statistic": "mean"},
    }  # fmt: skip
    values = list(zip(header, row, strict=True))[first:]
    if reason := dict(values).get("Skipped"):
        return [ExternalResult(**common, median=None, cache="cold", detail=cleaned(reason))]
    results: list[ExternalResult] = []
    for cache, column in _CSV_TIMES:
        place = next(
            (at for at, (name, value) in enumerate(values) if name == column and value), None
        )
        if place is None or (not cache and results):
            continue
        noise = next(
            (value for name, value in values[place + 1 : place + 2] if name == "Noise"), ""
        )
        samples = [value for name, value in values[:place] if name == "Samples" and value]
        n = count(samples[-1], "Samples") if samples else 0
        time = scaled(number(values[place][1], column), _US)
        results.append(ExternalResult(**common, **_of_mean(time, noise, n), cache=cache))
    return results


def _check_form(file: Mapping[str, Any], path: str) -> None:
    try:
        major = file["meta"]["version"]["json"]["major"]
    except (KeyError, TypeError):
        return  # written before files had a version
    if major != _FORM:
        raise UsageError(
            f"{path} is of version {major!r} of nvbench's JSON, {_FORM} is read here: "
            "update flexq-bench, or write the file with an earlier nvbench"
        )


def _others_of_a_kind(benchmarks: list[Any], devices: Mapping[Any, Any]) -> dict[Any, str]:
    """Return the devices whose states are ignored because an earlier one has the same name.

    The value is the reason for a message.
    """
    first: dict[str, Any] = {}
    refused_devices: dict[Any, str] = {}
    for benchmark in benchmarks:
        states = benchmark.get("states") if isinstance(benchmark, dict) else None
        for state in states if isinstance(states, list) else ():
            number = state.get("device") if isinstance(state, dict) else None
            name = devices[number].get("name") if number in devices else None
            if isinstance(name, str) and first.setdefault(name, number) != number:
                refused_devices[number] = (
                    f"it is another {name}, and device {first[name]} is read: run with --devices "
                    f"{first[name]}"
                )
    return refused_devices


def _refuse(reason: str) -> list[ExternalResult]:
    raise BadResult(reason)


def _states(
    benchmarks: list[Any],
    devices: Mapping[Any, Any],
    version: str,
    folder: Path,
    left_out: Collection[Any],
) -> Iterator[tuple[str, Callable[[], list[ExternalResult]]]]:
    for position, benchmark in enumerate(benchmarks, start=1):
        name = benchmark.get("name") if isinstance(benchmark, dict) else None
        states = benchmark.get("states") if isinstance(benchmark, dict) else None
        if not isinstance(name, str) or not isinstance(states, list):
            yield f"benchmark {position}", partial(_refuse, "it has no name, or no states")
            continue
        for state in states:
            if isinstance(state, dict) and state.get("device") in left_out:
                continue
            label = state.get("name") if isinstance(state, dict) else None
            of_state = f"{name} {label or ''}".strip()
            yield of_state, partial(_results, name, state, devices, version, folder)


def _results(
    name: str, state: dict[str, Any], devices: Mapping[Any, Any], version: str, folder: Path
) -> list[ExternalResult]:
    axes = {axis["name"]: _axis_value(axis) for axis in state.get("axis_values") or ()}
    shape, variant = split_parameters(axes)
    device = devices.get(state.get("device"))
    common: dict[str, Any] = {
        "name": name,
        "variant": variant,
        "shape": shape,
        "device": str(device["name"]) if device else "",
        "extra": {"state": cleaned(state.get("name", ""))},
    }
    summaries = {summary["tag"]: _values(summary) for summary in state.get("summaries") or ()}
    own = {tag: values for tag, values in summaries.items() if not tag.startswith("nv/")}
    if own:
        common["extra"]["summaries"] = kept(own)
    if state.get("is_skipped"):
        detail = cleaned(state.get("skip_reason") or "nvbench skipped it without a reason")
        environment = {"tool": "nvbench", "tool_version": version}
        skipped = ExternalResult(
            **common, median=None, cache="cold", detail=detail, environment=environment
        )
        return [skipped]
    results = []
    for cache, stem in _MODES:
        side = "cpu" if stem == "nv/cpu_only" else "gpu"
        timed = _timed(summaries, stem, side, folder)
        if timed is not None:
            statistic, values = timed
            environment = {"tool": "nvbench", "tool_version": version, "statistic": statistic}
            values |= _clock(summaries.get(f"{stem}/sm_clock_rate/mean", {}), device or {})
            results.append(ExternalResult(**common, **values, cache=cache, environment=environment))
    if not results:
        raise BadResult("it has no time: no nv/cold, nv/batch or nv/cpu_only summary")
    return results


def _clock(summary: Mapping[str, Any], device: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mean SM clock, with a remark if it is below the device's default. Both in Hz."""
    if summary.get("value") is None:
        return {}
    mhz = number(summary["value"], "the SM clock") / 1e6
    default = device.get("sm_default_clock_rate")
    default_mhz = 0.0 if default is None else number(default, "the default SM clock") / 1e6
    fields: dict[str, Any] = {"sm_clock_mhz": mhz}
    if mhz < _LOW_CLOCK * default_mhz:
        share = f"{mhz / default_mhz:.0%} of the device's {default_mhz:.0f} MHz"
        fields["remarks"] = (f"the SM clock was {share}",)
    return fields


def _timed(
    summaries: Mapping[str, Mapping[str, Any]], stem: str, side: str, folder: Path
) -> tuple[str, dict[str, Any]] | None:
    """Return the statistic and values of one kind of measurement; None: it was not measured."""
    time = f"{stem}/time/{side}"

    def value(tag: str) -> float | None:
        value = summaries.get(tag, {}).get("value")
        return None if value is None else number(value, tag)

    def microseconds(tag: str) -> float | None:
        seconds = value(tag)
        return None if seconds is None else scaled(seconds, _US)

    mean = microseconds(f"{time}/mean")
    n = count(summaries.get(f"{stem}/sample_size", {}).get("value", 0), f"{stem}/sample_size")
    samples = _samples(summaries.get(f"nv/json/bin:{stem}/sample_times"), folder)
    if samples:
        median, low, high = of_samples(samples)
        return "median", {
            "median": median,
            "low": low,
            "high": high,
            "samples": samples,
            "n_samples": len(samples),
        }
    middle = microseconds(f"{time}/median")
    if middle is not None:
        q1, q3 = microseconds(f"{time}/q1"), microseconds(f"{time}/q3")
        ends: tuple[float | None, float | None] = (None, None)
        if q1 is not None and q3 is not None and n:
            ends = notches(middle, q1, q3, n)
        return "median", {
            "median": middle, "low": ends[0], "high": ends[1], "n_samples": n,
        }  # fmt: skip
    if mean is None:
        return None
    deviation = summaries.get(f"{time}/stdev/relative", {}).get("value")
    return "mean", _of_mean(mean, deviation, n)


def _of_mean(mean: float, deviation: object, n: int) -> dict[str, Any]:
    """Return the fields of a mean of n samples with their relative standard deviation."""
    # For fewer than five samples nvbench writes an infinite one.
    known = deviation not in (None, "") and str(deviation) not in _NOT_FINITE and n
    reach = _Z_95 * number(deviation, "the deviation") * mean / math.sqrt(n) if known else None
    return {
        "median": mean,
        "low": None if reach is None else max(mean - reach, mean / 1000),
        "high": None if reach is None else mean + reach,
        "n_samples": n,
    }


def _samples(summary: Mapping[str, Any] | None, folder: Path) -> tuple[float, ...]:
    """Return the samples of a sidecar file (little-endian float32, seconds) in microseconds.

    Empty: there is no such file. Only files below the JSON file's folder, or below the parent of
    that folder, are opened, because the path is untrusted input.
    """
    if summary is None or not isinstance(summary.get("filename"), str):
        return ()
    n_samples = count(summary.get("size", 0), "the number of samples")
    if n_samples > MAX_SAMPLES:
        raise BadResult(f"it has more than {MAX_SAMPLES:,} samples")
    for home in (folder, folder.parent):
        path = (home / summary["filename"]).resolve()
        if path.is_relative_to(home) and path.is_file():
            with path.open("rb") as file:
                data = file.read(4 * n_samples + 1)
            if len(data) != 4 * n_samples:
                raise BadResult(f"{path.name} does not hold {n_samples} samples")
            values = array.array("f", data)
            if sys.byteorder != "little":
                values.byteswap()
            return tuple(seconds * _US for seconds in values)
    return ()


def _values(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in summary.get("data") or ()}


def _axis_value(axis: Mapping[str, Any]) -> object:
    value = axis.get("value")
    return axis.get("input_string", "") if value is None else value


def _version(file: Mapping[str, Any]) -> str:
    try:
        return cleaned(file["meta"]["version"]["nvbench"]["string"])
    except (KeyError, TypeError):
        return ""

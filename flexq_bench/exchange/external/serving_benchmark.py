"""Serving benchmarks of vLLM, SGLang and TensorRT-LLM: one JSON object per run.

`vllm bench serve --save-result` writes an object, `python -m sglang.bench_serving --output-file` a
line per run, `trtllm-bench --report_json` an object of sections. The names of all numbers say what
they are: `median_ttft_ms`, `request_throughput`, `system_output_throughput_tok_s`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.exchange.external.result import (
    ExternalResult,
    Reading,
    by_unit,
    cleaned,
    collect_each,
    in_us,
    kept,
    read_objects,
)

_WHAT = "a serving benchmark of vLLM, SGLang or TensorRT-LLM"
# What a number's name ends with: its unit, and whether more is better.
_SECOND = r"_(per_)?s(ec(ond)?)?"
_KINDS = (
    (re.compile(rf"req(uests?)?{_SECOND}|request_(throughput|goodput).*"), "requests/s", True),
    (re.compile(rf"tok(ens?)?{_SECOND}|\w+_throughput.*"), "tokens/s", True),
    (re.compile(r"ms"), "ms", False),
    (re.compile(r"latency"), "s", False),  # of one batch, as `vllm bench latency` has it
)
# Of trtllm-bench: percentiles whose names have no unit, and their unit.
_PERCENTILES = {"ttft_percentiles": "ms", "tpot_percentiles": "ms", "gen_tps_percentiles": "tok_s"}
_FAILED = ("failed", "num_failed_requests")
# Settings of the load; a number of them is another series.
_SETTINGS = (
    "backend", "endpoint_type", "dataset_name", "request_rate", "burstiness", "max_concurrency",
    "num_prompts", "random_input_len", "random_output_len", "random_range_ratio", "tp_size",
    "pp_size", "num_requests", "max_batch_size", "max_num_tokens", "batch_size", "input_len",
    "output_len",
)  # fmt: skip
_MODEL = ("run_name", "model_id", "model", "model_name", "backend")
_DATE = "%Y%m%d-%H%M%S"


def read(path: str) -> Reading:
    """Read every latency and rate as a metric of its own, with its direction.

    Raises UsageError if the file has none.
    """
    runs = read_objects(path, _WHAT)
    if not any(isinstance(run, dict) and list(_numbers(run)) for run in runs):
        raise UsageError(f"{path} has no latency and no throughput: name {_WHAT}")
    return collect_each(runs, _results, "run")


def _results(run: Mapping[str, Any]) -> list[ExternalResult]:
    flat, machine = dict(_flat(run)), run.get("machine")
    model = next((str(flat[name]) for name in _MODEL if flat.get(name)), "serving")
    settings = [f"{name}={_text(flat[name])}" for name in _SETTINGS if flat.get(name) is not None]
    at = None
    with suppress(ValueError):
        at = datetime.strptime(str(run.get("date")), _DATE).replace(tzinfo=UTC).isoformat()
    lost = next((flat[name] for name in _FAILED if isinstance(flat.get(name), int)), 0)
    errors = sum(bool(error) for error in run.get("errors") or ())
    lost = max(lost, errors)
    common: dict[str, Any] = {
        "name": model,
        "variant": ",".join(settings),
        "device": cleaned(machine.get("name") if isinstance(machine, Mapping) else ""),
        "environment": {
            "tool": "serving benchmark", "version": cleaned(flat.get("version") or ""),
        },
        "created_at": at,
        "remarks": (f"{lost} requests failed",) if lost else (),
    }  # fmt: skip
    others = ("completed", "duration", "total_input_tokens", "total_output_tokens", "label")
    extra = {name: kept(flat[name]) for name in others if name in flat}
    return [ExternalResult(**common, **fields, extra=extra) for fields in _fields(flat, run)]


def _fields(flat: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for metric, value, unit, higher in _numbers(flat):
        fields = by_unit(value, unit, higher=higher) | {"metric": metric.removesuffix("_ms")}
        first_tokens = run.get("ttfts")
        if metric == "median_ttft_ms" and isinstance(first_tokens, list):
            samples = tuple(in_us(seconds, "s", "a ttft") for seconds in first_tokens if seconds)
            fields |= {"samples": samples, "n_samples": len(samples)}
        yield fields


def _numbers(run: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, bool]]:
    """Yield name, value, unit and direction of latencies and rates."""
    for path, value in _flat(run):
        stem, _, name = path.rpartition(".")
        if _are_percentiles(stem):
            name = f"{stem.removesuffix('_ms')}_{name}_{_PERCENTILES.get(stem, 'ms')}"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0 or name.startswith("std_"):
            continue  # 0: not measured, for example without streaming
        for pattern, unit, higher in _KINDS:
            if (match := pattern.search(name)) and match.end() == len(name):
                yield name, value, unit, higher
                break


def _flat(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts of nested objects by name; percentiles by that of both."""
    for key, member in value.items():
        if isinstance(member, Mapping):
            yield from _flat(member, str(key))
        elif not isinstance(member, list):
            name = f"p{key}_latency" if above == "percentiles" else str(key)
            yield (f"{above}.{key}" if _are_percentiles(above) else name), member


def _are_percentiles(name: str) -> bool:
    return name.endswith("_ms") or name in _PERCENTILES


def _text(value: object) -> str:
    return "inf" if value == math.inf else cleaned(value)

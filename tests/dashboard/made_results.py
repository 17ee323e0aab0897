"""Runs and records, made up, for tests of pages."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from flexq_bench.db.records import CommitInfo, DeviceInfo, Record, RunInfo
from flexq_bench.exchange.external.records import Origin, external_records
from flexq_bench.exchange.external.result import ExternalResult, Reading

COMMIT = CommitInfo("c0ffee" + "0" * 34, None, 7, dirty=False, subject="A change", author="Ada")
H200 = "NVIDIA H200"
SHAPES = (("llama-7b", "o_proj", 4096, 4096), ("llama-7b", "down_proj", 4096, 11008))
MEDIANS = {"cublaslt-w8a8": 12.0, "flexq-w6a6": 8.0}
STARTED = "2025-11-21T10:00:00+00:00"
ACME: dict[str, Any] = {"commit": replace(COMMIT, project="acme"), "project": "acme"}


def a_run(name: str = "run", **changes: Any) -> RunInfo:
    identity = str(uuid.uuid5(uuid.NAMESPACE_DNS, name))
    run = RunInfo(identity, "paper-fig10", "manual", "complete", STARTED, identity)
    return replace(run, **changes)


def a_record(run: RunInfo | None = None, **changes: Any) -> Record:
    """A right result of flexq-w6a6 on an H200: 8 µs ±1 %, half as fast as the floor."""
    fields: dict[str, Any] = {
        "kernel": "flexq-w6a6",
        "variant": "",
        "stage": "gemm",
        "cache": "cold",
        "m": 1,
        "n": 4096,
        "k": 4096,
        "median_us": 8.0,
        "floor_us": 4.0,
        "backend": "cuda",
        "gpu": H200,
    } | changes
    label = fields["kernel"] + (f"[{fields['variant']}]" if fields["variant"] else "")
    case = f"{label} {fields['stage']} {fields['cache']} m{fields['m']}n{fields['n']}k{fields['k']}"
    run = run or a_run()
    median, floor = fields["median_us"], fields["floor_us"]
    defaults: dict[str, Any] = {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{run.uuid} {case} {fields['gpu']}")),
        "case": case,
        "kernel_version": 1,
        "metric": "time",
        "unit": "us",
        "direction": "lower",
        "weight_bits": 6,
        "act_bits": 6,
        "group": 128,
        "input_distribution": "normal-v1",
        "protocol_version": 1,
        "model": "llama-7b",
        "layer": "o_proj",
        "status": "ok",
        "detail": "",
        "ci_low_us": median and 0.99 * median,
        "ci_high_us": median and 1.01 * median,
        "n_samples": 50,
        "placement_medians_us": (),
        "samples_us": (),
        "pct_of_floor": median and floor and 100 * floor / median,
        "launch_us": 1.5,
        "tops": 5.5,
        "max_rel_error": 0.0,
        "exact": True,
        "accepted": fields.get("status", "ok") == "ok" and median is not None,
        "config": {},
        "binary_hash": None,
        "seed": 0,
        "sm_clock_mhz": None,
        "mem_clock_mhz": None,
        "power_w": None,
        "temperature_c": None,
        "throttle_mask": None,
        "n_invalid": 0,
        "created_at": "2025-11-21T10:00:05+00:00",
        "run": run,
        "commit": COMMIT,
        "device": DeviceInfo(f"uuid of {fields['gpu']}", fields["gpu"], fields["backend"]),
        "environment": {"driver": "580.1"},
    }
    return Record(**defaults | fields)


def records_of(
    run: RunInfo | None = None, m: Sequence[int] = (1, 8), **changes: Any
) -> list[Record]:
    """Two kernels on two layers at each M; flexq is 1.5 times as fast as the baseline."""
    return [
        a_record(
            run, kernel=kernel, median_us=median, m=tokens, model=model, layer=layer, n=n, k=k,
            **changes,
        )
        for model, layer, n, k in SHAPES
        for tokens in m
        for kernel, median in MEDIANS.items()
    ]  # fmt: skip


def of_another_tool(**changes: Any) -> dict[str, Any]:
    """Fields of a benchmark without shape, of project acme."""
    return {
        **dict.fromkeys(("stage", "cache", "operation", "parameters"), ""),
        **dict.fromkeys(("regime", "m", "n", "k")),
        "kernel": "requests",
        "backend": "outside",
        "weight_bits": 0,
        "act_bits": 0,
        "metric": "throughput",
        "unit": "req/s",
        "direction": "higher",
        **ACME,
    } | changes


def attention(context: int, kernel: str = "sdpa", **changes: Any) -> Record:
    """A result of another operation than a linear layer."""
    parameters = f"batch=1 context={context} heads=32"
    fields = {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{kernel} {parameters}")),
        "kernel": kernel,
        "operation": "attention_decode",
        "parameters": parameters,
        "stage": "op",
        "case": f"{kernel} op cold attention_decode:{parameters.replace(' ', ',')}",
        **dict.fromkeys("mnk"),
    }
    return a_record(**fields | changes)


def counts(values: Sequence[float], *, first: int = 1, unit: str = "spills") -> list[Record]:
    """Counts of project p that another tool gave at the commits first, first + 1, …"""
    records: list[Record] = []
    for count, value in enumerate(values, first):
        commit = CommitInfo(f"{count:040x}", None, None, dirty=False, project="p")
        at = (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=count)).isoformat()
        origin = Origin("p", commit, "G", time=at, occasion=str(count))
        result = ExternalResult("gemm", "", value, metric="spills", unit=unit)
        records += external_records(Reading((result,)), origin)[0]
    return records


def numbers(values: Any) -> list[float]:
    """Return the values of a chart's array, packed by Plotly or not."""
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).tolist()
    return list(values)

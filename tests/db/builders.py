"""Records, runs and commits for the tests: sensible by default, any field can be overridden."""

from __future__ import annotations

import uuid
from typing import Any

from db.accuracy_records import AccuracyRecord
from db.records import CommitInfo, DeviceInfo, Record, RunInfo

NAMESPACE = uuid.UUID(int=0)


def a_commit(order: int | None = 1, **changes: Any) -> CommitInfo:
    fields: dict[str, Any] = {
        "sha": f"{order or 0:040x}",
        "parent": f"{order - 1:040x}" if order and order > 1 else None,
        "topo_order": order,
        "dirty": False,
        "subject": f"Change {order}",
        "author": "Ada",
        "committed_at": "2025-11-01T00:00:00+00:00",
    }
    return CommitInfo(**fields | changes)


def a_device(**changes: Any) -> DeviceInfo:
    fields: dict[str, Any] = {
        "uuid": "GPU-1",
        "sku": "NVIDIA H200",
        "backend": "cuda",
        "power_limit_w": 700.0,
        "ecc": True,
        "sm_count": 132,
        "compute_capability": "9.0",
    }
    return DeviceInfo(**fields | changes)


def a_run(name: str = "run", **changes: Any) -> RunInfo:
    run_uuid = str(uuid.uuid5(NAMESPACE, name))
    fields: dict[str, Any] = {
        "uuid": run_uuid,
        "suite": "smoke",
        "trigger": "manual",
        "status": "complete",
        "created_at": "2025-11-21T10:00:00+00:00",
        "idempotency_key": run_uuid,
        "plan": (),
    }
    return RunInfo(**fields | changes)


def a_record(name: str = "record", **changes: Any) -> Record:
    m = changes.get("m", 1)
    kernel = changes.get("kernel", "flexq-w6a6")
    run = changes.get("run", a_run())
    case = changes.get("case", f"{kernel} gemm cold m{m}n4096k4096")
    fields: dict[str, Any] = {
        "uuid": str(uuid.uuid5(NAMESPACE, f"{name} {run.uuid} {case}")),
        "case": case,
        "kernel": kernel,
        "variant": "",
        "kernel_version": 1,
        "backend": "cuda",
        "stage": "gemm",
        "cache": "cold",
        "metric": "time",
        "unit": "us",
        "direction": "lower",
        "m": m,
        "n": 4096,
        "k": 4096,
        "weight_bits": 6,
        "act_bits": 6,
        "group": 128,
        "input_distribution": "normal",
        "protocol_version": 1,
        "gpu": "NVIDIA H200",
        "model": "llama-7b",
        "layer": "o_proj",
        "status": "ok",
        "detail": "",
        "median_us": 6.1,
        "ci_low_us": 6.0,
        "ci_high_us": 6.2,
        "n_samples": 4,
        "placement_medians_us": (6.1, 6.15),
        "samples_us": ((6.1, 6.1), (6.2, 6.1)),
        "floor_us": 4.0,
        "pct_of_floor": 65.57377049180329,
        "launch_us": 1.5,
        "tops": 5.5,
        "max_rel_error": 0.0,
        "exact": True,
        "accepted": True,
        "config": {"block_n": 64, "splits": 4},
        "binary_hash": "abc",
        "seed": 0,
        "sm_clock_mhz": 1980.0,
        "mem_clock_mhz": 3201.0,
        "power_w": 310.5,
        "temperature_c": 41.0,
        "throttle_mask": 4,
        "n_invalid": 0,
        "created_at": "2025-11-21T10:00:05+00:00",
        "run": run,
        "commit": a_commit(),
        "device": a_device(),
        "environment": {"driver": "580.1", "torch": "2.13.0"},
    }
    return Record(**fields | changes)


def an_accuracy_record(name: str = "record", **changes: Any) -> AccuracyRecord:
    run = changes.get("run", a_run(suite="accuracy"))
    fields: dict[str, Any] = {
        "uuid": str(uuid.uuid5(NAMESPACE, f"accuracy {name} {run.uuid}")),
        "model": "tiny-llama",
        "model_hash": "ab" * 32,
        "scheme": "w6a6",
        "task": "wikitext",
        "task_version": "1",
        "data_hash": "cd" * 32,
        "metric": "perplexity",
        "direction": "lower",
        "status": "ok",
        "detail": "",
        "value": 14.15,
        "standard_error": 0.5,
        "n_items": 15555,
        "values": (2.5, 2.75, 1 / 3),
        "seed": 0,
        "parameters": {"context": 256, "options": {"group": 128}},
        "created_at": "2025-11-21T10:00:05+00:00",
        "run": run,
        "commit": a_commit(),
        "device": a_device(),
        "environment": {"driver": "580.1", "torch": "2.13.0"},
    }
    return AccuracyRecord(**fields | changes)

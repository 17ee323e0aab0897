"""Records, runs and commits for the tests: sensible by default, any field can be overridden."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from flexq_bench.db.decisions import DecisionInfo
from flexq_bench.db.records import (
    AccuracyRecord,
    CommitInfo,
    DecodeRecord,
    DeviceInfo,
    GateLimit,
    GateRecord,
    Record,
    RunInfo,
    ServingRecord,
)
from flexq_bench.db.writer import series_identity

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
        **_origin(f"{name} {run.uuid} {case}", run),
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
        "accepted": (
            changes.get("status", "ok") == "ok" and changes.get("median_us", 6.1) is not None
        ),
        "config": {"block_n": 64, "splits": 4},
        "binary_hash": "abc",
        "seed": 0,
        "sm_clock_mhz": 1980.0,
        "mem_clock_mhz": 3201.0,
        "power_w": 310.5,
        "temperature_c": 41.0,
        "throttle_mask": 4,
        "n_invalid": 0,
    }
    return Record(**fields | changes)


def an_accuracy_record(name: str = "record", **changes: Any) -> AccuracyRecord:
    run = changes.get("run", a_run(suite="accuracy"))
    fields: dict[str, Any] = {
        **_origin(f"accuracy {name} {run.uuid}", run),
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
    }
    return AccuracyRecord(**fields | changes)


def a_gate_record(name: str = "record", **changes: Any) -> GateRecord:
    run = changes.get("run", a_run(suite="accuracy"))
    passed = GateLimit(
        "perplexity of wikitext", "+1 %", "pass", "", 14.0, 14.06, 0.4, 0.3, 0.5, "%"
    )
    lost = GateLimit(
        "parity of kernels", "0.001", "regression", "28 layers", None, None, None, None, None, ""
    )
    fields: dict[str, Any] = {
        **_origin(f"gate {name} {run.uuid}", run),
        "model": "tiny-llama",
        "model_hash": "ab" * 32,
        "scheme": "w6a6",
        "base": "fp16",
        "policy": "default",
        "policy_version": 1,
        "policy_hash": "ef" * 32,
        "verdict": "regression",
        "exit_code": 1,
        "limits": (passed, lost),
    }
    return GateRecord(**fields | changes)


def a_decode_record(name: str = "record", **changes: Any) -> DecodeRecord:
    run = changes.get("run", a_run(suite="decode"))
    fields: dict[str, Any] = {
        **_of_a_model("decode", name, run),
        "batch": 4,
        "prompt_tokens": 15,
        "new_tokens": 128,
        "prefill_ms": 9.5,
        "token_ms": 2.75,
        "token_ci_low_ms": 2.7,
        "token_ci_high_ms": 2.8,
        "token_p95_ms": 2.9,
        "process_medians_ms": (2.75, 2.7),
        "tokens_per_s": 1454.5,
        "peak_memory_bytes": 11 << 30,
        "energy_j_per_token": 0.4,
        "parts": ({"part": "norm", "count": 81, "us": 120.5},),
    }
    return DecodeRecord(**fields | changes)


def a_serving_record(name: str = "record", **changes: Any) -> ServingRecord:
    run = changes.get("run", a_run(suite="decode"))
    fields: dict[str, Any] = {
        **_of_a_model("serving", name, run),
        "batch_limit": 32,
        "memory_limit_bytes": 24 << 30,
        "requests": 100,
        "prompt_tokens": 6100,
        "new_tokens": 20300,
        "lengths": "lognormal",
        "tokens_per_s": 3000.0,
        "latency_p50_s": 1.5,
        "latency_p95_s": 4.5,
        "latency_p99_s": 6.0,
        "token_p50_ms": 9.0,
        "token_p95_ms": 11.0,
    }
    return ServingRecord(**fields | changes)


def _of_a_model(kind: str, name: str, run: RunInfo) -> dict[str, Any]:
    return {
        **_origin(f"{kind} {name} {run.uuid}", run),
        "case": f"{kind} tiny-llama {name}",
        "model": "tiny-llama",
        "weights": "synthetic",
        "scheme": "flexq-w6ax",
        "kernels": {"qkv_proj": "flexq", "down_proj": "flexq[w6a8]"},
        "backend": "cuda",
        "kv_bits": 16,
        "protocol_version": 1,
        "status": "ok",
        "detail": "",
        "weights_bytes": 10 << 30,
        "steady_memory_bytes": 11 << 30,
        "parameters": {"seed": 0, "processes": 2},
    }


def _origin(name: str, run: RunInfo) -> dict[str, Any]:
    """Return the fields that all kinds of records have. name: the uuid is made of it."""
    return {
        "uuid": str(uuid.uuid5(NAMESPACE, name)),
        "created_at": "2025-11-21T10:00:05+00:00",
        "run": run,
        "commit": a_commit(),
        "device": a_device(),
        "environment": {"driver": "580.1", "torch": "2.13.0"},
    }


def a_decision(record: Record, *, base: int = 1, head: int = 2, **changes: Any) -> DecisionInfo:
    """Return a decision on the series of a record. base, head: order of the commits."""
    fields: dict[str, Any] = {
        "uuid": "one",
        "series": series_identity(record),
        "base": a_commit(base, project=record.project),
        "head": a_commit(head, project=record.project),
        "device": record.device,
        "watched": True,
        "detector": "interleaved",
        "detector_version": 1,
        "parameters": {"confidence": 0.99},
        "evidence": {"base_us": [1 / 3], "note": "ü"},
        "verdict": "slower",
        "cause": "code",
        "reason": "+5 %",
        "log_ratio": 0.05,
        "log_ratio_low": 0.04,
        "log_ratio_high": 0.06,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "rule": "slower if it takes longer",
        "numbers": {"p_value": 1e-9},
    }
    return DecisionInfo(**fields | changes)

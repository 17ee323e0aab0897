"""Scores and decodes of models, made up, for tests of pages."""

from __future__ import annotations

import math
import uuid
from typing import Any

from made_results import COMMIT, H200, a_run

from flexq_bench.db.records import (
    AccuracyRecord,
    DecodeRecord,
    DeviceInfo,
    GateLimit,
    GateRecord,
    RunInfo,
    ServingRecord,
)

GIB = 2**30
FP16_NLL = (2.0, 3.0, 2.5, 2.6, 2.4)
LAYERS = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
          "model.layers.0.self_attn.q_proj"]  # fmt: skip


def _origin(run: RunInfo) -> dict[str, Any]:
    """Fields of every record: when and where it was measured."""
    return {
        "created_at": "2025-11-21T10:00:05+00:00",
        "run": run,
        "commit": COMMIT,
        "device": DeviceInfo("GPU-1", H200, "cuda"),
        "environment": {"driver": "580.1"},
    }


def _uuid(*parts: object) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, " ".join(map(str, parts))))


def a_score(scheme: str, metric: str = "perplexity", **changes: Any) -> AccuracyRecord:
    """A score of SmolLM on wikitext; the perplexity is exp of the mean of its values."""
    run = changes.pop("run", a_run("accuracy", suite="accuracy"))
    fields: dict[str, Any] = {
        "model": "SmolLM2-135M",
        "model_hash": "ab" * 32,
        "scheme": scheme,
        "task": "wikitext",
        "task_version": "1",
        "data_hash": "cd" * 32,
        "metric": metric,
        "direction": "lower",
        "status": "ok",
        "detail": "",
        "standard_error": 0.5,
        "n_items": 8188,
        "values": FP16_NLL,
        "seed": 0,
        "parameters": {},
        **_origin(run),
    } | changes
    if "value" not in fields:
        fields["value"] = math.exp(sum(fields["values"]) / len(fields["values"]))
    parts = [run.uuid, scheme, fields["task"], metric, fields["commit"].sha, fields["model"]]
    parts += [fields[name] for name in ("content_hash", "through") if name in fields]
    return AccuracyRecord(uuid=_uuid(*parts), **fields)


def worse(by: float, **changes: Any) -> dict[str, Any]:
    """Values whose perplexity is larger by this factor on every segment."""
    return {"values": tuple(v + math.log1p(by) for v in FP16_NLL), **changes}


def a_gate(scheme: str, outcome: str = "pass", **changes: Any) -> GateRecord:
    """SmolLM's perplexity on wikitext against +1 %, judged in a run of its scores."""
    run = changes.pop("run", a_run("accuracy", suite="accuracy"))
    limit = GateLimit(
        "perplexity of wikitext", "+1 %", outcome, "", 12.0, 12.06, 0.5, 0.4, 0.6, "%"
    )
    fields: dict[str, Any] = {
        "model": "SmolLM2-135M",
        "model_hash": "ab" * 32,
        "scheme": scheme,
        "base": "fp16",
        "policy": "default",
        "policy_version": 1,
        "policy_hash": "ef" * 32,
        "verdict": outcome,
        "exit_code": {"pass": 0, "regression": 1, "ambiguous": 3, "missing": 4}.get(outcome, 1),
        "limits": (limit,),
        **_origin(run),
    } | changes
    parts = (run.uuid, scheme, fields["model"], fields["commit"].sha, fields["created_at"])
    return GateRecord(uuid=_uuid(*parts), **fields)


def a_decode(scheme: str, batch: int = 1, token_ms: float | None = 10.0, **changes: Any) -> Any:
    """A decode of llama-7b, 15 tokens in and 128 out, ±1 %."""
    run = changes.pop("run", a_run("decode", suite="decode"))
    fields: dict[str, Any] = {
        "case": f"llama-7b {scheme} b{batch}",
        "model": "llama-7b",
        "weights": "synthetic",
        "scheme": scheme,
        "kernels": {},
        "backend": "cuda",
        "kv_bits": 16,
        "batch": batch,
        "prompt_tokens": 15,
        "new_tokens": 128,
        "protocol_version": 1,
        "status": "ok",
        "detail": "",
        "prefill_ms": token_ms,
        "token_ms": token_ms,
        "token_ci_low_ms": token_ms and 0.99 * token_ms,
        "token_ci_high_ms": token_ms and 1.01 * token_ms,
        "token_p95_ms": token_ms and 1.05 * token_ms,
        "process_medians_ms": (),
        "tokens_per_s": token_ms and 1000 * batch / token_ms,
        "weights_bytes": 5 * GIB,
        "steady_memory_bytes": 6 * GIB,
        "peak_memory_bytes": (6 + batch) * GIB,
        "energy_j_per_token": None,
        "parts": (),
        "parameters": {},
        **_origin(run),
    } | changes
    parts = (run.uuid, fields["case"], fields["model"], fields["prompt_tokens"], fields["weights"])
    return DecodeRecord(uuid=_uuid(*parts), **fields)


def a_serving(scheme: str, slots: int, tokens_per_s: float | None, **changes: Any) -> ServingRecord:
    """A hundred requests served on llama-7b."""
    run = changes.pop("run", a_run("decode", suite="decode"))
    seconds = tokens_per_s and 1000 / tokens_per_s
    fields: dict[str, Any] = {
        "case": f"serve llama-7b {scheme} b{slots} {changes.get('memory_limit_bytes')}",
        "model": "llama-7b",
        "weights": "synthetic",
        "scheme": scheme,
        "kernels": {},
        "backend": "cuda",
        "kv_bits": 16,
        "batch_limit": slots,
        "memory_limit_bytes": None,
        "requests": 100,
        "prompt_tokens": 6100,
        "new_tokens": 20300,
        "lengths": "lognormal",
        "protocol_version": 2,
        "status": "ok",
        "detail": "",
        "tokens_per_s": tokens_per_s,
        "latency_p50_s": seconds,
        "latency_p95_s": seconds and 3 * seconds,
        "latency_p99_s": seconds and 4 * seconds,
        "token_p50_ms": seconds,
        "token_p95_ms": seconds,
        "ttft_p50_ms": seconds,
        "ttft_p95_ms": seconds,
        "weights_bytes": 5 * GIB,
        "steady_memory_bytes": 6 * GIB,
        "parameters": {"slots": slots},
        **_origin(run),
    } | changes
    parts = (run.uuid, fields["case"], fields["kv_bits"])
    return ServingRecord(uuid=_uuid(*parts), **fields)

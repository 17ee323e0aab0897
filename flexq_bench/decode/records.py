"""Conversion of the results of decode and serving processes to records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from flexq_bench.db.identity import name_uuid
from flexq_bench.db.records import (
    CommitInfo,
    DecodeRecord,
    DeviceInfo,
    ProcessDecode,
    RunInfo,
    ServingRecord,
)
from flexq_bench.decode.case import PROTOCOL_VERSION, DecodeCase, Setup
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.stats.bootstrap import hierarchical_interval
from flexq_bench.workloads.models import load_catalog


@dataclass(frozen=True, slots=True)
class MeasurementOrigin:
    """Origin of a measurement: run, commit, device and environment."""

    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]


@dataclass(slots=True)
class ProcessResults:
    """Results of the processes of one case.

    loaded: response to the last load. refused: reason why the case can't be measured. parts:
    profile of a step; empty: none was profiled. spent_s: time of the last process, by phase.
    logits_sha256: of its logits, if they don't depend on the batch. cache_token_bytes: of the cache
    of one more token of each sequence. first_of: tokens of a longer decode, whose first these are.
    """

    processes: list[ProcessDecode] = field(default_factory=list)
    parts: tuple[dict[str, Any], ...] = ()
    loaded: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    spent_s: dict[str, float] = field(default_factory=dict)
    logits_sha256: str = ""
    cache_token_bytes: int | None = None
    first_of: int | None = None

    def take_first(self, case: DecodeCase, longer: DecodeCase, results: ProcessResults) -> None:
        """Take the first tokens of a longer decode; its memory is without the others' cache."""
        self.first_of = longer.new_tokens
        without = (longer.new_tokens - case.new_tokens) * (results.cache_token_bytes or 0)
        self.processes = [
            replace(
                process,
                step_ms=process.step_ms[: case.new_tokens - 1],
                steady_memory_bytes=_less(process.steady_memory_bytes, without),
                peak_memory_bytes=_less(process.peak_memory_bytes, without),
            )
            for process in results.processes
        ]


def _less(nbytes: int | None, without: int) -> int | None:
    return None if nbytes is None else nbytes - without


@dataclass(frozen=True, slots=True)
class ServingCase:
    """Requests to serve under a scheme. lengths: source of their lengths. memory_limit: bytes.

    step_tokens: most prompt tokens between two steps. kv_bits: of the cache.
    """

    scheme: str
    batch_limit: int
    memory_limit: int | None
    requests: tuple[ServingRequest, ...]
    lengths: str
    step_tokens: int
    kv_bits: int = 16

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence at its end."""
        return max(request.length for request in self.requests)

    def key(self, setup: Setup) -> str:
        """The key within a run."""
        within = "" if self.memory_limit is None else f" m{self.memory_limit}"
        return (
            f"serve {setup.model} {self.scheme} kv{self.kv_bits} b{self.batch_limit}{within} "
            f"r{len(self.requests)} t{self.step_tokens}"
        )


@dataclass(frozen=True, slots=True)
class ServingResult:
    """Result of a serving case.

    slots: concurrent sequences. loaded: response to the load. answer: response to serving; None:
    refused. refused: the reason.
    """

    case: ServingCase
    slots: int
    loaded: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] | None = None
    refused: str = ""


def decode_record(
    setup: Setup, case: DecodeCase, results: ProcessResults, source: MeasurementOrigin
) -> DecodeRecord:
    """Build the record of a case from the processes so far."""
    done = results.processes
    steps = [process.step_ms for process in done if process.step_ms]
    interval = hierarchical_interval(steps, seed=setup.seed) if steps else None
    joules = [process.energy_j for process in done if process.energy_j is not None]
    tokens = case.batch * case.new_tokens
    shared = _shared(setup, case, case.key, results.loaded, source)
    shared["parameters"] |= {"processes": len(done), "spent_s": results.spent_s}
    if results.first_of is not None:
        shared["parameters"]["first_tokens_of"] = results.first_of
    if results.logits_sha256:
        shared["parameters"]["logits_sha256"] = results.logits_sha256
    shared["parameters"]["configs"] = results.loaded.get("configs", {}).get(str(case.batch), {})
    return DecodeRecord(
        **shared,
        status="ok" if done else "refused",
        detail="" if done else results.refused,
        batch=case.batch,
        prompt_tokens=case.prompt_tokens,
        new_tokens=case.new_tokens,
        prefill_ms=statistics.median(p.prefill_ms for p in done) if done else None,
        token_ms=interval.estimate if interval else None,
        token_ci_low_ms=interval.low if interval else None,
        token_ci_high_ms=interval.high if interval else None,
        token_p95_ms=float(np.percentile(np.concatenate(steps), 95)) if steps else None,
        process_medians_ms=tuple(
            float(statistics.median(process_steps)) for process_steps in steps
        ),
        tokens_per_s=1000 * case.batch / interval.estimate if interval else None,
        steady_memory_bytes=_median_bytes([p.steady_memory_bytes for p in done]),
        peak_memory_bytes=_median_bytes([p.peak_memory_bytes for p in done]),
        energy_j_per_token=None if not joules else float(statistics.median(joules)) / tokens,
        parts=results.parts,
        processes=tuple(done),
    )


def serving_record(setup: Setup, served: ServingResult, source: MeasurementOrigin) -> ServingRecord:
    """Build the record of a serving, or of its refusal."""
    case, answer = served.case, served.answer
    new = sum(request.new_tokens for request in case.requests)

    def percentile(name: str, percent: int) -> float | None:
        values = answer[name] if answer else []
        return float(np.percentile(values, percent)) if values else None

    shared = _shared(setup, case, case.key(setup), served.loaded, source)
    shared["parameters"] |= {"slots": served.slots, "step_tokens": case.step_tokens}
    return ServingRecord(
        **shared,
        status="ok" if answer else "refused",
        detail=served.refused,
        batch_limit=case.batch_limit,
        memory_limit_bytes=case.memory_limit,
        requests=len(case.requests),
        prompt_tokens=sum(request.prompt_tokens for request in case.requests),
        new_tokens=new,
        lengths=case.lengths,
        tokens_per_s=new / answer["seconds"] if answer else None,
        latency_p50_s=percentile("latency_s", 50),
        latency_p95_s=percentile("latency_s", 95),
        latency_p99_s=percentile("latency_s", 99),
        token_p50_ms=percentile("token_ms", 50),
        token_p95_ms=percentile("token_ms", 95),
        ttft_p50_ms=percentile("ttft_ms", 50),
        ttft_p95_ms=percentile("ttft_ms", 95),
        steady_memory_bytes=answer["steady_bytes"] if answer else None,
    )


def _shared(
    setup: Setup,
    case: DecodeCase | ServingCase,
    key: str,
    loaded: dict[str, Any],
    source: MeasurementOrigin,
) -> dict[str, Any]:
    synthetic = loaded.get("is_synthetic", setup.model in load_catalog())
    return {
        "uuid": name_uuid(f"{source.run.uuid} {key}"),
        "case": key,
        "model": loaded.get("model") or (setup.model if synthetic else name_of_model(setup.model)),
        "weights": "synthetic" if synthetic else str(setup.model),
        "scheme": case.scheme,
        "scheme_version": loaded.get("scheme_version"),
        "content_hash": content_hash_of(loaded, case.kv_bits),
        "kernels": loaded.get("kernels", {}),
        "backend": source.device.backend,
        "kv_bits": case.kv_bits,
        "protocol_version": PROTOCOL_VERSION,
        "weights_bytes": loaded.get("weights_bytes"),
        "parameters": {
            "seed": setup.seed,
            "tuning": setup.tuning.value,
            "load_s": loaded.get("load_s"),
            "load_peak_bytes": loaded.get("load_peak_bytes"),
        },
        "created_at": datetime.now(UTC).isoformat(),
        "run": source.run,
        "commit": source.commit,
        "device": source.device,
        "environment": source.environment,
    }


def content_hash_of(loaded: Mapping[str, Any], kv_bits: int) -> str | None:
    """Content hash of the loaded checkpoint with this cache width; None: it is no checkpoint."""
    hashes: Mapping[str, str] = loaded.get("content_hashes", {})
    return hashes.get(str(kv_bits))


def name_of_model(model: str) -> str:
    """Name of a model by its folder or .gguf file."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.resolve().name


def _median_bytes(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(statistics.median(known)) if known else None

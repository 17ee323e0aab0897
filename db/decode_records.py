"""Records of whole models at work: one decode, one serving run; self-contained as Record.

In files of results they stand among the others, told apart by their `kind`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from db.records import SCHEMA_VERSION, CommitInfo, DeviceInfo, RunInfo

DECODE_STATUSES = (
    "ok",  # decoded and timed
    "refused",  # it can't be on this device, for example for lack of memory; the detail says why
    "failed",  # it raised; the detail says what
)


@dataclass(frozen=True, slots=True)
class ProcessDecode:
    """Measurements of a decode case in one fresh process."""

    number: int  # of the process within the run, from 0
    gpu: str  # the device's uuid
    prefill_ms: float
    step_ms: tuple[float, ...]  # of each token after the first; empty: there was only one
    steady_memory_bytes: int | None  # null: not known (CPU)
    peak_memory_bytes: int | None  # null: as steady_memory_bytes
    energy_j: float | None  # of all tokens, the prompt included; null: the device has no counter


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Fields common to records of decodes and of servings."""

    uuid: str  # uuid5 of run uuid and case: the same record everywhere
    case: str  # its identity within the run
    model: str
    weights: str  # "synthetic": random ones of the model's shapes; else where they came from
    scheme: str
    kernels: dict[str, Any]  # label of the kernel of each linear layer, by layer
    backend: str  # "cuda" | "cpu"
    kv_bits: int
    protocol_version: int
    status: str  # one of DECODE_STATUSES
    detail: str  # why, where the status is not ok; empty otherwise
    weights_bytes: int | None  # null: nothing was loaded
    steady_memory_bytes: int | None  # null: not known (CPU)
    parameters: dict[str, Any]  # seed, tuning, what loading took, and what else was chosen
    created_at: str  # of what was measured last: of two records with one uuid the newer one stands
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    content_hash: str | None = None  # of the checkpoint decoded; null: not known
    scheme_version: int | None = None  # null: not kept
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRecord(ModelRecord):
    """A batch of equal prompts, decoded greedily. Times in ms; null where it was never timed."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_ms: float | None  # median over processes of the time to the first token
    token_ms: float | None  # median over processes of each one's median over tokens
    token_ci_low_ms: float | None
    token_ci_high_ms: float | None
    token_p95_ms: float | None  # over the tokens of all processes
    process_medians_ms: tuple[float, ...]
    tokens_per_s: float | None  # of the whole batch, after the first token
    peak_memory_bytes: int | None  # while decoding; null: as steady_memory_bytes
    energy_j_per_token: float | None  # of one sequence's token; null: the device has no counter
    parts: tuple[dict[str, Any], ...]  # part, count and us of one step; empty: no profiler
    processes: tuple[ProcessDecode, ...] = ()  # in the order measured; empty: not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecord(ModelRecord):
    """Requests that arrived together, served in order by continuous batching."""

    batch_limit: int  # sequences at a time
    memory_limit_bytes: int | None  # null: none was given
    requests: int
    prompt_tokens: int  # of all requests
    new_tokens: int
    lengths: str  # where the requests' lengths come from
    tokens_per_s: float | None  # new tokens over the time from first arrival to last token
    latency_p50_s: float | None  # of a request, from its admission to its last token
    latency_p95_s: float | None
    latency_p99_s: float | None
    token_p50_ms: float | None  # between two tokens of one request
    token_p95_ms: float | None
    # From a request's admission to its first token; null: as the others, or measured before it was.
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None

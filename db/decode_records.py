"""Records of whole-model measurements: a decode case, a serving run.

Self-contained like Record. In a results file their `kind` distinguishes them from other records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexq_bench.db.records import SCHEMA_VERSION, CommitInfo, DeviceInfo, RunInfo

DECODE_STATUSES = (
    "ok",  # decoded and timed
    "refused",  # can't run on this device, for example for lack of memory; see detail
    "failed",  # it raised; see detail
)


@dataclass(frozen=True, slots=True)
class ProcessDecode:
    """Measurements of a decode case in one fresh process."""

    number: int  # index of the process within the run, from 0
    gpu: str  # uuid of the device
    prefill_ms: float
    step_ms: tuple[float, ...]  # per token after the first; empty: only one token was generated
    steady_memory_bytes: int | None  # None: unknown (CPU)
    peak_memory_bytes: int | None  # None: unknown (CPU)
    energy_j: float | None  # of all tokens including the prompt; None: no energy counter


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """Fields common to DecodeRecord and ServingRecord."""

    uuid: str  # uuid5 of run uuid and case: equal in every database
    case: str  # unique within the run
    model: str
    weights: str  # "synthetic": random values in the model's shapes; else their source
    scheme: str
    kernels: dict[str, Any]  # kernel label by linear layer
    backend: str  # "cuda" | "cpu"
    kv_bits: int
    protocol_version: int
    status: str  # one of DECODE_STATUSES
    detail: str  # reason if the status is not ok; empty otherwise
    weights_bytes: int | None  # None: nothing was loaded
    steady_memory_bytes: int | None  # None: unknown (CPU)
    parameters: dict[str, Any]  # seed, tuning, load time and other settings
    created_at: str  # of the last measurement: of two records with one uuid the newer is kept
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    content_hash: str | None = None  # of the decoded checkpoint; None: unknown
    scheme_version: int | None = None  # None: not recorded
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRecord(ModelRecord):
    """Greedy decoding of a batch of equal prompts. Times in ms; None: not timed."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_ms: float | None  # time to first token, median over processes
    token_ms: float | None  # median over processes of the median over tokens
    token_ci_low_ms: float | None
    token_ci_high_ms: float | None
    token_p95_ms: float | None  # over the tokens of all processes
    process_medians_ms: tuple[float, ...]
    tokens_per_s: float | None  # whole batch, after the first token
    peak_memory_bytes: int | None  # while decoding; None: unknown (CPU)
    energy_j_per_token: float | None  # per token of one sequence; None: no energy counter
    parts: tuple[dict[str, Any], ...]  # part, count and us of one step; empty: no profiler
    processes: tuple[ProcessDecode, ...] = ()  # in measurement order; empty: not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRecord(ModelRecord):
    """Continuous batching of requests that all arrive at the start, served in order."""

    batch_limit: int  # maximum number of concurrent sequences
    memory_limit_bytes: int | None  # None: no limit
    requests: int
    prompt_tokens: int  # of all requests
    new_tokens: int
    lengths: str  # source of the requests' lengths
    tokens_per_s: float | None  # new tokens over the time from first arrival to last token
    latency_p50_s: float | None  # per request, from admission to last token
    latency_p95_s: float | None
    latency_p99_s: float | None
    token_p50_ms: float | None  # between consecutive tokens of one request
    token_p95_ms: float | None
    # From a request's admission to its first token; None also in records older than these fields.
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None

"""Records of results of all kinds, in the files of `run --json`, `db export` and `db import`.

A record is self-contained: importing a file of records recreates the same rows and uuids in any
database, and importing it twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1

STATUSES = (
    "ok",  # measured, converged, correct
    "noisy",  # measured and correct, but the interval did not converge in time
    "incorrect",  # wrong output; its time is never compared
    "unsupported",  # this device or stage can't run it; see detail
    "failed",  # it raised; see detail
)

COMPARABLE_STATUSES = ("ok", "noisy")

TIME_METRICS = {"boost": "time", "sustained": "sustained_time"}  # by regime

EXTERNAL_BACKEND = "outside"  # of results measured by another tool, with its own protocol
STATIC_BACKEND = "static"  # of metrics of the machine code

LINEAR = "linear"  # the operation of results from before others existed

RUN_STATUSES = (
    "running",  # started, not finished
    "complete",  # the whole plan was processed
    "interrupted",  # stopped by a user; can be resumed
    "failed",  # the device or the database failed
)


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """The commit whose kernels ran. sha of an installed wheel: `pkg-<version>-<source hash>`."""

    sha: str
    parent: str | None  # None: the root commit, or unknown (installed wheel)
    topo_order: int | None  # only in files of earlier versions: number of first parents up to here
    dirty: bool
    subject: str = ""
    author: str = ""
    committed_at: str | None = None  # ISO 8601, UTC
    project: str = ""  # name of the external repository; empty: this repository
    parents: tuple[str, ...] = ()  # shas, the first one is `parent`; empty: none, or unknown
    branch: str = ""  # on which it was measured; empty: unknown


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Device of a result. uuid of a CPU: a hash of host name and model."""

    uuid: str
    sku: str  # NVML name, for example "NVIDIA H200"; a CPU's model name
    # "cuda" | "cpu"; "static": metric of the machine code, nothing ran; or EXTERNAL_BACKEND
    backend: str
    vbios: str | None = None
    power_limit_w: float | None = None
    ecc: bool | None = None
    mig: bool | None = None
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    sm_count: int | None = None
    compute_capability: str | None = None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run of a record. plan: the keys of all its cases (see Case.key)."""

    uuid: str
    suite: str
    trigger: str  # "manual" | "sweep" | "nightly" | "gate" | "import"
    status: str  # one of RUN_STATUSES
    created_at: str  # ISO 8601, UTC
    idempotency_key: str
    plan: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOwner:
    """Process that executes a run. start: distinguishes it from later processes with its pid."""

    host: str
    pid: int
    start: str


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement of one case. Times in microseconds; None: not timed.

    For metrics other than time, median_us and its interval are in the metric's unit. m, n, k: of
    linear layers; None: of another operation, whose parameters are the text `parameters`.
    """

    # identity of the measurement and of its series
    uuid: str  # uuid5 of run uuid, case key and attempt: equal in every database
    case: str  # Case.key
    kernel: str
    variant: str
    kernel_version: int
    backend: str
    stage: str
    cache: str
    metric: str  # "time", "sustained_time"; static: "registers", "spill_bytes" …
    unit: str  # "us"; "registers", "bytes", "warps" …
    direction: str  # "lower" | "higher": which way is better
    m: int | None
    n: int | None
    k: int | None
    weight_bits: int
    act_bits: int
    group: int | None  # None: one scale per row, or no scales
    input_distribution: str
    protocol_version: int
    gpu: str  # SKU; static: the architecture, for example "sm_86"

    # labels
    model: str
    layer: str

    # results
    status: str  # one of STATUSES
    detail: str  # reason if the status is not ok; empty otherwise
    median_us: float | None  # since protocol 4 a trimmed mean on a GPU (docs/protocol.md)
    ci_low_us: float | None
    ci_high_us: float | None
    n_samples: int
    placement_medians_us: tuple[float, ...]  # of placements with valid samples; as median_us
    samples_us: tuple[tuple[float, ...], ...]  # by placement, in measurement order
    floor_us: float | None  # read-<bits> of this N and K in the same run on the same device
    pct_of_floor: float | None  # 100 · floor_us / median_us
    launch_us: float | None  # time of the empty kernel in the same run
    tops: float | None  # 2·M·N·K / median_us, in 10^12/s
    max_rel_error: float | None
    exact: bool | None  # integer part bit-exact; None: the kernel has no integer part
    accepted: bool  # usable in comparisons and baselines: status ok or noisy, not invalid or dirty
    config: dict[str, Any]
    binary_hash: str | None
    seed: int

    # state of the device: SM MHz, memory MHz, W, °C, throttle reasons (bit mask of NVML)
    sm_clock_mhz: float | None
    mem_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_mask: int | None
    n_invalid: int  # samples with an SM clock too low for the regime, stored but excluded

    created_at: str
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]  # driver, CUDA, torch, compiler flags, host, clock policy …
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)
    # Measurement conditions. None: protocol 1, which had no regimes, or nothing ran.
    regime: str | None = None  # "boost": free of the power limit; "sustained": under steady load
    sample_gap_us: float | None = None  # idle time before each sample
    launch_j: float | None = None  # joules per launch; None also under "boost"
    project: str = ""  # tool or repository of an external result; empty: measured here
    # Sources of a kernel from outside of the repository; None: a kernel of the commit.
    source_hash: str | None = None
    operation: str = LINEAR  # empty: a benchmark of another tool, of no known operation
    parameters: str = ""  # `batch=1 heads=32`, in the operation's order; of LINEAR: m, n and k

    def __post_init__(self) -> None:
        # In files of earlier versions, what has no shape has the size 1.
        has_no_shape = self.backend in (EXTERNAL_BACKEND, STATIC_BACKEND) and 1 in (self.n, self.k)
        if self.operation == LINEAR and has_no_shape:
            object.__setattr__(self, "operation", "")
        sizes = {name: getattr(self, name) for name in "mnk"}
        if not self.operation:
            sizes = {name: None if size == 1 else size for name, size in sizes.items()}
            for name, size in sizes.items():
                object.__setattr__(self, name, size)
        if self.operation in (LINEAR, ""):
            object.__setattr__(self, "parameters", parameters_text(sizes))


def parameters_text(values: Mapping[str, int | str | None]) -> str:
    """Return parameters as `tokens=8 experts=128`; those that are None are left out."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


ACCURACY_STATUSES = (
    "ok",  # evaluated
    "failed",  # evaluation raised, or the metric is not finite; see detail
)
THROUGH = (
    "reference",  # dequantized weights, activations rounded in torch
    "kernels",  # every quantized layer runs its kernel
)


@dataclass(frozen=True, slots=True)
class AccuracyRecord:
    """One metric of one task of a model under a scheme."""

    uuid: str  # uuid5 of run uuid, scheme, task and metric: equal in every database
    model: str
    model_hash: str  # of the loaded files
    scheme: str  # "fp16": the unquantized model
    task: str  # for example wikitext, piqa
    task_version: str
    data_hash: str  # of the evaluation data
    metric: str  # for example perplexity, acc
    direction: str  # "lower" | "higher": which way is better
    status: str  # one of ACCURACY_STATUSES
    detail: str  # reason if the status is not ok; empty otherwise
    value: float | None  # None: not evaluated, see status and detail
    standard_error: float | None  # None: not reported by the task
    n_items: int  # tokens or questions
    values: tuple[float, ...]  # per segment or question, in order; empty: not reported
    seed: int
    parameters: dict[str, Any]  # of quantization and evaluation
    created_at: str
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    through: str = "reference"  # one of THROUGH; the unquantized model has "reference"
    content_hash: str | None = None  # of the evaluated checkpoint; None: fp16, or unknown
    scheme_version: int | None = None  # None: fp16, or not recorded
    # Position of the BOS token: segment, text, none. None: not a text task, or not recorded.
    bos: str | None = None
    schema_version: int = SCHEMA_VERSION


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


# Worst first; "missing" and "regression" are those of records of earlier versions.
GATE_OUTCOMES = ("missing", "regression", "fail", "not judged", "ambiguous", "pass")


@dataclass(frozen=True, slots=True)
class GateLimit:
    """One limit of the policy. change, low, high: in `unit`."""

    check: str  # for example "perplexity of wikitext", "parity of kernels"
    limit: str  # in words
    outcome: str  # one of GATE_OUTCOMES
    reason: str  # explanation; may be empty
    base: float | None  # None: not evaluated, see reason
    value: float | None  # None: not evaluated, see reason
    change: float | None  # None: not evaluated, or not defined for this check
    low: float | None  # bounds of the 95 % interval; None: no interval
    high: float | None
    unit: str
    detectable: float | None = None  # smallest detectable loss; None: not defined for this limit
    text: str = ""  # the text that was judged; empty: none, or unknown
    coverage: str = ""  # how much was judged, as "28 of 28 layers"; empty: unknown
    cause: str = ""  # explanation of a failure; may be empty
    details: tuple[str, ...] = ()  # differences and the like, one a line
    allowed: bool = False  # the policy allows that it is not judged

    def __post_init__(self) -> None:
        # JSON, from which limits are read, has lists.
        object.__setattr__(self, "details", tuple(self.details))


@dataclass(frozen=True, slots=True)
class GateRecord:
    """One verdict on one scheme of a model."""

    uuid: str  # uuid5 of run uuid, policy, base, scheme and time: equal in every database
    model: str
    model_hash: str  # of the loaded files
    scheme: str
    base: str  # scheme it is compared with
    policy: str  # name
    policy_version: int  # of the policy's file format
    policy_hash: str  # of the policy's content
    verdict: str  # one of GATE_OUTCOMES: the worst of its limits
    exit_code: int  # of the gate command
    limits: tuple[GateLimit, ...]
    created_at: str
    run: RunInfo  # in which the model was evaluated
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]
    through: str = "reference"  # one of THROUGH
    content_hash: str | None = None  # of the judged checkpoint; None: unknown
    reference: str | None = None  # reference model; None: the unquantized model itself
    reference_hash: str | None = None  # of its files, or of the stored predictions
    diagnosis: dict[str, Any] | None = None  # layers that lose accuracy; None: no loss, or unknown
    schema_version: int = SCHEMA_VERSION


ModelResultRecord = AccuracyRecord | DecodeRecord | ServingRecord | GateRecord
AnyRecord = Record | ModelResultRecord
MODEL_KINDS: dict[str, type[ModelResultRecord]] = {
    "accuracy": AccuracyRecord,
    "decode": DecodeRecord,
    "serving": ServingRecord,
    "gate": GateRecord,
}  # records of whole models, by their `kind` in a file; a measurement has none

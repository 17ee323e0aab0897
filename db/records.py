"""The result record: what `run --json`, `db export` and `db import` speak, one a measurement.

A record is self-contained: from a file of them a database elsewhere is rebuilt with the same
identities, so importing twice changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1

STATUSES = (
    "ok",  # measured, converged, correct
    "noisy",  # measured and correct, but the interval did not close in time
    "incorrect",  # wrong output; its time is never compared
    "unsupported",  # this device or stage can't run it; the detail says why
    "failed",  # it raised; the detail says what
)

COMPARABLE_STATUSES = ("ok", "noisy")

TIME_METRICS = {"boost": "time", "sustained": "sustained_time"}  # by regime

RUN_STATUSES = (
    "running",  # started, and nobody has finished it
    "complete",  # the whole plan was gone through
    "interrupted",  # stopped by hand; it can be resumed
    "failed",  # the machine or the store gave up
)


@dataclass(frozen=True, slots=True)
class CommitInfo:
    """The commit whose kernels ran. sha of an installed wheel: `pkg-<version>-<source hash>`."""

    sha: str
    parent: str | None  # None: the root commit, or unknown (installed wheel)
    topo_order: int | None  # commits on the first-parent line up to here; None: not in a git tree
    dirty: bool
    subject: str = ""
    author: str = ""
    committed_at: str | None = None  # ISO 8601, UTC
    project: str = ""  # of whose repository; empty: the one whose kernels are measured here


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Device that a result is from. uuid of a CPU: a hash of host name and model."""

    uuid: str
    sku: str  # NVML name, for example "NVIDIA H200"; a CPU's model name
    backend: str  # "cuda" | "cpu"; "static": nothing ran, machine code was read; "outside"
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
    """The run a record belongs to. plan: the keys of every case it declared (see Case.key)."""

    uuid: str
    suite: str
    trigger: str  # "manual" | "sweep" | "nightly" | "gate" | "import"
    status: str  # one of RUN_STATUSES
    created_at: str  # ISO 8601, UTC
    idempotency_key: str
    plan: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOwner:
    """A process that has a run under way. start: tells it from a later one of the same number."""

    host: str
    pid: int
    start: str


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement of one case. Times in microseconds; null where it was never timed.

    Where the metric is not time, median_us and its interval hold the value in the metric's unit.
    """

    # identity of the measurement and of its series
    uuid: str  # uuid5 of run uuid, case key and attempt: the same record has the same uuid anywhere
    case: str  # Case.key
    kernel: str
    variant: str
    kernel_version: int
    backend: str
    stage: str
    cache: str
    metric: str  # "time", "sustained_time"; of machine code: "registers", "spill_bytes" …
    unit: str  # "us"; "registers", "bytes", "warps" …
    direction: str  # "lower" | "higher": which way is better
    m: int
    n: int
    k: int
    weight_bits: int
    act_bits: int
    group: int | None  # None: one scale a row, or none
    input_distribution: str
    protocol_version: int
    gpu: str  # SKU; of machine code: the architecture, "sm_86"

    # labels
    model: str
    layer: str

    # what was found
    status: str  # one of STATUSES
    detail: str  # why, where the status is not ok; empty otherwise
    median_us: float | None
    ci_low_us: float | None
    ci_high_us: float | None
    n_samples: int
    placement_medians_us: tuple[float, ...]
    samples_us: tuple[tuple[float, ...], ...]  # by placement, in the order measured
    floor_us: float | None  # read-<bits> of this N and K in the same run on the same device
    pct_of_floor: float | None  # 100 · floor_us / median_us
    launch_us: float | None  # the empty kernel in the same run
    tops: float | None  # 2·M·N·K / median, in 10^12 a second
    max_rel_error: float | None
    exact: bool | None  # None: the kernel has no integer part
    accepted: bool  # may be compared and be a baseline: status ok or noisy, not invalid or dirty
    config: dict[str, Any]
    binary_hash: str | None
    seed: int

    # state of the device: SM MHz, memory MHz, W, °C, throttle reasons (bit mask of NVML)
    sm_clock_mhz: float | None
    mem_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    throttle_mask: int | None
    n_invalid: int  # samples at too low an SM clock for their regime, kept but not counted

    created_at: str
    run: RunInfo
    commit: CommitInfo
    device: DeviceInfo
    environment: dict[str, str]  # driver, CUDA, torch, compiler flags, host, clock policy …
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] = field(default_factory=dict)
    # How the time was taken. None: by protocol 1, which named no regime, or nothing ran.
    regime: str | None = None  # "boost": free of the power limit; "sustained": under steady load
    sample_gap_us: float | None = None  # idle time before each sample
    launch_j: float | None = None  # joules of a launch; None also under "boost"
    project: str = ""  # whose result it is: another tool's of that name; empty: measured here
    # Of the sources of a kernel from outside of the repository; None: one of the commit's own.
    source_hash: str | None = None

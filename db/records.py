"""Result record: one per measurement, in the files of `run --json`, `db export` and `db import`.

A record is self-contained: importing a file of records recreates the same rows and uuids in any
database, and importing it twice changes nothing.
"""

from __future__ import annotations

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
    topo_order: int | None  # number of first-parent commits up to this one; None: not in a git tree
    dirty: bool
    subject: str = ""
    author: str = ""
    committed_at: str | None = None  # ISO 8601, UTC
    project: str = ""  # name of the external repository; empty: this repository


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Device of a result. uuid of a CPU: a hash of host name and model."""

    uuid: str
    sku: str  # NVML name, for example "NVIDIA H200"; a CPU's model name
    backend: str  # "cuda" | "cpu"; "static": metric of the machine code, nothing ran; "outside"
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

    For metrics other than time, median_us and its interval are in the metric's unit.
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
    m: int
    n: int
    k: int
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

"""SQLAlchemy models of all tables.

Without postponed annotations: SQLAlchemy would evaluate the text of each, at every start.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

# A migration can only change constraints that have a name.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """Timezone-aware datetime in UTC. SQLite stores it without its zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        in_utc = value.astimezone(UTC)
        return in_utc.replace(tzinfo=None) if dialect.name == "sqlite" else in_utc

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        stored: datetime = value
        return stored.replace(tzinfo=UTC) if stored.tzinfo is None else stored.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of all tables. Nested values are JSON, not JSONB, which would normalize numbers."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it as a plain class attribute)
        str: String,
        float: Double,
        datetime: UtcDateTime,
    }


# Provenance


class Commit(Base):
    """A commit of a project. Projects in the same repository have separate rows.

    A tree with local changes also has a row of its own (dirty), which is never a baseline.
    """

    __tablename__ = "commit"
    __table_args__ = (UniqueConstraint("sha", "dirty", "project"), Index(None, "position"))

    id: Mapped[int] = mapped_column(primary_key=True)
    sha: Mapped[str]
    parent_sha: Mapped[str | None]  # null: the root commit, or unknown (installed wheel)
    # Only of records of earlier versions, which counted first parents: orders commits whose
    # ancestry is not stored. Null: not recorded.
    topo_order: Mapped[int | None] = mapped_column(BigInteger)
    dirty: Mapped[bool]
    subject: Mapped[str]  # empty: unknown
    author: Mapped[str]  # empty: unknown
    committed_at: Mapped[datetime | None]  # null: unknown (installed wheel)
    # Name of an external project; empty: this repository.
    project: Mapped[str] = mapped_column(server_default="")
    branch: Mapped[str] = mapped_column(server_default="")  # it was measured on; empty: unknown
    # Place on the main line, in order of ancestry; written by db.lines. Null: not on it.
    position: Mapped[int | None] = mapped_column(BigInteger)
    orphaned_at: Mapped[datetime | None]  # since when no branch reaches it; null: one does


class CommitParent(Base):
    """A parent of a commit of a project, measured or not."""

    __tablename__ = "commit_parent"
    __table_args__ = (
        UniqueConstraint("project", "sha", "number"),
        Index(None, "project", "parent_sha"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str]  # as of a commit
    sha: Mapped[str]
    number: Mapped[int] = mapped_column(BigInteger)  # of the parent, from 0
    parent_sha: Mapped[str | None]  # null: a root commit


class Branch(Base):
    """A branch of a project, with its tip as last seen in a clone; each is a line of history."""

    __tablename__ = "branch"
    __table_args__ = (UniqueConstraint("project", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str]  # as of a commit
    name: Mapped[str]  # empty: the main branch, whose name is not known
    is_main: Mapped[bool]
    tip_sha: Mapped[str | None]  # null: never seen in a clone
    tip_at: Mapped[datetime | None]  # commit time of the tip; null: as tip_sha
    closed_at: Mapped[datetime | None]  # when it was seen to be deleted; null: open
    # Place on the main line of the last commit before the branch began. Null: none, or main.
    fork_position: Mapped[int | None] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(server_default="")  # on the last rewrite; empty: none
    noted_at: Mapped[datetime | None]  # null: no note


class BranchCommit(Base):
    """Place of a commit on the line of a branch other than main, after its fork position."""

    __tablename__ = "branch_commit"

    branch_id: Mapped[int] = mapped_column(ForeignKey("branch.id"), primary_key=True)
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"), primary_key=True, index=True)
    position: Mapped[int] = mapped_column(BigInteger)


class Device(Base):
    """A device with its settings: another power limit or vbios of the same board is another row."""

    __tablename__ = "device"

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(unique=True)  # of all the columns below
    uuid: Mapped[str] = mapped_column(index=True)
    sku: Mapped[str]
    backend: Mapped[str]
    # Null in the columns below: not reported by the driver, or not applicable to a CPU.
    vbios: Mapped[str | None]
    power_limit_w: Mapped[float | None]
    ecc: Mapped[bool | None]
    mig: Mapped[bool | None]
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    l2_bytes: Mapped[int | None] = mapped_column(BigInteger)
    sm_count: Mapped[int | None] = mapped_column(BigInteger)
    compute_capability: Mapped[str | None]


class Environment(Base):
    """Driver, CUDA, torch, compiler flags, host, clock policy; may change within a series."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(unique=True)  # of `content`
    content: Mapped[dict[str, Any]] = mapped_column(JSON)  # name -> text


# Runs and their plans


class Run(Base):
    """One execution of a plan. Its records may arrive in any order, from several machines."""

    __tablename__ = "run"
    __table_args__ = (Index(None, "status", "created_at"), Index(None, "created_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    idempotency_key: Mapped[str] = mapped_column(unique=True)
    suite: Mapped[str]
    trigger: Mapped[str]
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    status: Mapped[str]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]  # null: not finished, or imported
    # The process that started or last resumed it. Null: imported, or unknown.
    owner_host: Mapped[str | None]
    owner_pid: Mapped[int | None] = mapped_column(BigInteger)
    owner_start: Mapped[str | None]  # distinguishes the process from later ones with its pid
    # of the command that last started it, by name, without secrets; null: unknown
    options: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class PlannedCase(Base):
    """A case in the plan of a run; without a result for it, a gate returns `missing`."""

    __tablename__ = "planned_case"
    __table_args__ = (UniqueConstraint("run_id", "case_key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    position: Mapped[int] = mapped_column(BigInteger)  # in the plan, from 0
    case_key: Mapped[str]


# Series and epochs


class Series(Base):
    """All that must be equal for two results to be comparable; hashed in identity_hash."""

    __tablename__ = "series"
    __table_args__ = (
        Index(None, "kernel", "gpu"),
        Index(None, "gpu"),
        Index(None, "project"),
        Index(None, "operation"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    identity_hash: Mapped[str] = mapped_column(unique=True)
    kernel: Mapped[str]
    kernel_version: Mapped[int] = mapped_column(BigInteger)
    variant: Mapped[str]  # empty: the plain kernel
    backend: Mapped[str]
    stage: Mapped[str]
    cache: Mapped[str]
    metric: Mapped[str]
    unit: Mapped[str]
    direction: Mapped[str]  # which way is better: lower, higher
    # Name of the operation; empty: a benchmark of another tool, of no known operation.
    operation: Mapped[str] = mapped_column(server_default="linear")
    parameters: Mapped[str] = mapped_column(server_default="")  # `batch=1 heads=32`; may be empty
    # The parameters of linear layers, for filters. Null: another operation, or no such parameter.
    m: Mapped[int | None] = mapped_column(BigInteger)
    n: Mapped[int | None] = mapped_column(BigInteger)
    k: Mapped[int | None] = mapped_column(BigInteger)
    weight_bits: Mapped[int] = mapped_column(BigInteger)
    act_bits: Mapped[int] = mapped_column(BigInteger)
    group: Mapped[int | None] = mapped_column(BigInteger)  # null: one scale per row, or no scales
    input_distribution: Mapped[str]
    protocol_version: Mapped[int] = mapped_column(BigInteger)
    gpu: Mapped[str]  # SKU
    # Tool or repository of external results; empty: measured here, and not part of the identity.
    project: Mapped[str] = mapped_column(server_default="")


class Epoch(Base):
    """Part of a series under one environment: levels are compared only within an epoch."""

    __tablename__ = "epoch"
    __table_args__ = (UniqueConstraint("series_id", "environment_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    first_run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    opened_at: Mapped[datetime]  # time of its earliest measurement


# Measurements and their raw samples


class Measurement(Base):
    """Summary of one measurement of a case. Times in microseconds."""

    __tablename__ = "measurement"
    __table_args__ = (
        Index(None, "series_id", "commit_id"),
        Index(None, "series_id", "created_at"),
        Index(None, "run_id", "case_key", "created_at"),
        Index(None, "run_id", "case_key", "repetition", unique=True),
        Index(None, "status", "created_at"),
        Index(None, "created_at"),
        Index(None, "model", "layer"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    case_key: Mapped[str]
    # Index of the repetition of the case in the run, from 1. Null: not given.
    repetition: Mapped[int | None] = mapped_column(BigInteger)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    epoch_id: Mapped[int] = mapped_column(ForeignKey("epoch.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    created_at: Mapped[datetime]

    model: Mapped[str]  # empty: not a model's shape
    layer: Mapped[str]  # empty: not a layer's shape

    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    accepted: Mapped[bool]
    median_us: Mapped[float | None]  # null: not timed, see status
    ci_low_us: Mapped[float | None]  # null: as median_us
    ci_high_us: Mapped[float | None]  # null: as median_us
    n_samples: Mapped[int] = mapped_column(BigInteger)
    n_invalid: Mapped[int] = mapped_column(BigInteger)
    placement_medians_us: Mapped[list[float]] = mapped_column(JSON)  # empty: as median_us
    floor_us: Mapped[float | None]  # null: this shape's floor was not measured in the run
    pct_of_floor: Mapped[float | None]  # null: no time, or no floor
    launch_us: Mapped[float | None]  # null: the empty kernel was not measured in the run
    tops: Mapped[float | None]  # null: no time
    max_rel_error: Mapped[float | None]  # null: not compared, or the output was not finite
    exact: Mapped[bool | None]  # null: not compared, or the kernel has no integer part

    config: Mapped[dict[str, Any]] = mapped_column(JSON)  # empty: not configurable
    binary_hash: Mapped[str | None]  # null: not compiled here, or it did not run
    seed: Mapped[int] = mapped_column(BigInteger)
    # Device state. Null: not reported by the driver, or a CPU.
    sm_clock_mhz: Mapped[float | None]
    mem_clock_mhz: Mapped[float | None]
    power_w: Mapped[float | None]
    temperature_c: Mapped[float | None]
    throttle_mask: Mapped[int | None] = mapped_column(BigInteger)
    extra: Mapped[dict[str, Any]] = mapped_column(JSON)  # may be empty
    # Null in the next two: protocol 1, which had no regimes, or nothing ran.
    regime: Mapped[str | None]  # boost: free of the power limit; sustained: under steady load
    sample_gap_us: Mapped[float | None]  # idle time before each sample
    launch_j: Mapped[float | None]  # null: as regime, or not sustained, or not reported
    source_hash: Mapped[str | None]  # of a kernel from outside; null: a kernel of the commit


class Sample(Base):
    """Raw samples of a measurement in measurement order. No row: not timed, or pruned."""

    __tablename__ = "sample"

    measurement_id: Mapped[int] = mapped_column(ForeignKey("measurement.id"), primary_key=True)
    count: Mapped[int] = mapped_column(BigInteger)
    # Samples of each placement; their sum is `count`.
    placement_counts: Mapped[list[int]] = mapped_column(JSON)
    data: Mapped[bytes]  # zlib of little-endian float64, microseconds, concatenated by placement


# Results of whole models


class ModelResult:
    """Mixin of the columns of all results of whole models."""

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    created_at: Mapped[datetime]
    model: Mapped[str]
    scheme: Mapped[str]
    content_hash: Mapped[str | None]  # of the checkpoint; null: the model itself, or unknown


class AccuracyResult(ModelResult, Base):
    """One metric of one task of a model under a scheme."""

    __tablename__ = "accuracy_result"
    __table_args__ = (
        Index(None, "model", "scheme", "task"),
        Index(None, "run_id"),
        Index(None, "content_hash"),
    )

    model_hash: Mapped[str]  # of the weights evaluated
    scheme_version: Mapped[int | None] = mapped_column(BigInteger)  # null: fp16, or not recorded
    through: Mapped[str]  # computation of the quantized layers: reference, kernels
    bos: Mapped[str | None]  # BOS position: segment, text, none; null: no text, or not recorded
    task: Mapped[str]  # for example wikitext2, piqa
    task_version: Mapped[str]
    data_hash: Mapped[str]  # of the text, or of all prompts
    metric: Mapped[str]  # for example perplexity, accuracy
    direction: Mapped[str]  # which way is better: lower, higher
    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    value: Mapped[float | None]  # null: not evaluated, see status
    standard_error: Mapped[float | None]  # null: not reported by the task
    n_items: Mapped[int] = mapped_column(BigInteger)  # tokens or questions evaluated
    seed: Mapped[int] = mapped_column(BigInteger)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # of quantization and evaluation


class AccuracySample(Base):
    """Values of a metric per segment or question, in data order. No row: not reported."""

    __tablename__ = "accuracy_sample"

    accuracy_result_id: Mapped[int] = mapped_column(
        ForeignKey("accuracy_result.id"), primary_key=True
    )
    count: Mapped[int] = mapped_column(BigInteger)
    data: Mapped[bytes]  # zlib of little-endian float64


class TimedModelResult(ModelResult):
    """Mixin of the columns common to decode and serving results."""

    case: Mapped[str] = mapped_column("case_key")
    weights: Mapped[str]  # synthetic: random values in the model's shapes
    scheme_version: Mapped[int | None] = mapped_column(BigInteger)  # null: not recorded
    kernels: Mapped[dict[str, Any]] = mapped_column(JSON)  # label by layer
    backend: Mapped[str]
    kv_bits: Mapped[int] = mapped_column(BigInteger)
    protocol_version: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[str]
    detail: Mapped[str]  # empty: the status is ok
    weights_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: nothing was loaded
    steady_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # of the scheme and the decode


class DecodeResult(TimedModelResult, Base):
    """One end-to-end decode of a model under a scheme."""

    __tablename__ = "decode_result"
    __table_args__ = (
        Index(None, "model", "scheme"),
        Index(None, "run_id"),
        Index(None, "content_hash"),
    )

    batch: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    new_tokens: Mapped[int] = mapped_column(BigInteger)
    prefill_ms: Mapped[float | None]  # null: not timed, see status
    token_ms: Mapped[float | None]  # median time of a decode step; null: as prefill_ms
    token_ci_low_ms: Mapped[float | None]  # null: as prefill_ms
    token_ci_high_ms: Mapped[float | None]  # null: as prefill_ms
    token_p95_ms: Mapped[float | None]  # null: as prefill_ms
    process_medians_ms: Mapped[list[float]] = mapped_column(JSON)
    tokens_per_s: Mapped[float | None]  # null: as prefill_ms
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    energy_j_per_token: Mapped[float | None]  # null: no energy counter
    parts: Mapped[list[Any]] = mapped_column(JSON)  # of a step; empty: no profiler


class DecodeSample(Base):
    """Measurements of a decode in one fresh process. No row: an older result."""

    __tablename__ = "decode_sample"

    decode_result_id: Mapped[int] = mapped_column(ForeignKey("decode_result.id"), primary_key=True)
    number: Mapped[int] = mapped_column(
        BigInteger, primary_key=True
    )  # index of the process, from 0
    gpu: Mapped[str]  # uuid of the device
    prefill_ms: Mapped[float]
    steady_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: unknown (CPU)
    energy_j: Mapped[float | None]  # null: no energy counter
    count: Mapped[int] = mapped_column(BigInteger)  # steps
    data: Mapped[bytes]  # zlib of little-endian float64, ms of each step


class ServingResult(TimedModelResult, Base):
    """One serving run (continuous batching) of a model under a scheme."""

    __tablename__ = "serving_result"
    __table_args__ = (Index(None, "model", "scheme"), Index(None, "run_id"))

    batch_limit: Mapped[int] = mapped_column(BigInteger)
    memory_limit_bytes: Mapped[int | None] = mapped_column(BigInteger)  # null: no limit
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)  # of all requests
    new_tokens: Mapped[int] = mapped_column(BigInteger)  # of all requests
    lengths: Mapped[str]  # source of the requests' lengths
    tokens_per_s: Mapped[float | None]  # null: not served, see status
    latency_p50_s: Mapped[float | None]  # null: as tokens_per_s
    latency_p95_s: Mapped[float | None]  # null: as tokens_per_s
    latency_p99_s: Mapped[float | None]  # null: as tokens_per_s
    token_p50_ms: Mapped[float | None]  # null: as tokens_per_s
    token_p95_ms: Mapped[float | None]  # null: as tokens_per_s
    ttft_p50_ms: Mapped[float | None]  # null: as tokens_per_s, or older than this column
    ttft_p95_ms: Mapped[float | None]  # null: as ttft_p50_ms


class AccuracyGate(ModelResult, Base):
    """One verdict on a scheme of a model under a policy."""

    __tablename__ = "accuracy_gate"
    __table_args__ = (Index(None, "model", "created_at"), Index(None, "run_id"))

    model_hash: Mapped[str]  # of the weights evaluated
    through: Mapped[str]  # computation of the quantized layers: reference, kernels
    base: Mapped[str]  # scheme it is compared with
    reference: Mapped[str | None]  # reference model; null: the unquantized model itself
    reference_hash: Mapped[str | None]  # of its files or stored predictions; null: as reference
    policy: Mapped[str]
    policy_version: Mapped[int] = mapped_column(BigInteger)  # of the policy's file format
    policy_hash: Mapped[str]  # of the policy's content
    verdict: Mapped[str]  # the worst outcome of its limits
    exit_code: Mapped[int] = mapped_column(BigInteger)
    limits: Mapped[list[Any]] = mapped_column(JSON)  # of db.records.GateLimit
    diagnosis: Mapped[dict[str, Any] | None] = mapped_column(JSON)  # of the loss; null: passed


# Decisions, alerts and change points


class Decision(Base):
    """One verdict; the numbers it was computed from are in DecisionEvidence."""

    __tablename__ = "decision"
    __table_args__ = (
        Index(None, "series_id", "base_commit_id"),
        Index(None, "series_id", "created_at"),
        Index(None, "created_at"),
        Index(None, "input_hash"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    series_id: Mapped[int | None] = mapped_column(ForeignKey("series.id"))  # null: of a whole run
    # Null: compared with history. Equal to the head's: A/A comparison of the commit.
    base_commit_id: Mapped[int | None] = mapped_column(ForeignKey("commit.id"))
    head_commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"), index=True)
    device_id: Mapped[int | None] = mapped_column(ForeignKey("device.id"))  # null: several devices
    base_run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))  # null: not two runs
    head_run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))  # null: as base_run_id
    # Null: not part of an alert.
    alert_id: Mapped[int | None] = mapped_column(ForeignKey("alert.id"), index=True)
    watched: Mapped[bool]  # on the watched branch: only such decisions open and close alerts
    detector: Mapped[str]
    detector_version: Mapped[int]
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # the detector's thresholds
    input_hash: Mapped[str]  # fingerprint of the evidence
    verdict: Mapped[str]
    cause: Mapped[str]
    reason: Mapped[str]
    log_ratio: Mapped[float | None]  # ln(head / base); null: nothing was judged
    log_ratio_low: Mapped[float | None]  # one-sided 99 % bound; null: as log_ratio
    log_ratio_high: Mapped[float | None]  # null: as log_ratio
    rule: Mapped[str] = mapped_column(server_default="")  # in words; empty: an earlier version
    # All numbers of the verdict, by name. Null in the next two: an earlier version.
    numbers: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    decided_hash: Mapped[str | None]  # fingerprint of all that was decided (`decided_hash`)
    created_at: Mapped[datetime]


class DecisionEvidence(Base):
    """The exact inputs of a decision; not read by lists."""

    __tablename__ = "decision_evidence"

    decision_id: Mapped[int] = mapped_column(ForeignKey("decision.id"), primary_key=True)
    data: Mapped[bytes]  # zlib of canonical JSON


class Alert(Base):
    """A regression in one family of kernels between two commits."""

    __tablename__ = "alert"
    __table_args__ = (UniqueConstraint("group_key"), Index(None, "state", "opened_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    group_key: Mapped[str]  # fingerprint of the commit range and the family
    family: Mapped[str] = mapped_column(index=True)
    state: Mapped[str]
    # Last good commit; null: bad since the first measurement.
    good_commit_id: Mapped[int | None] = mapped_column(ForeignKey("commit.id"))
    bad_commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))  # first bad commit measured
    opened_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]  # null: open
    note: Mapped[str]  # the newest; empty: no note


class AlertEvent(Base):
    """A change of an alert's state, or a note."""

    __tablename__ = "alert_event"
    __table_args__ = (Index(None, "alert_id", "created_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    alert_id: Mapped[int] = mapped_column(ForeignKey("alert.id"))
    state: Mapped[str]
    person: Mapped[str]  # empty: the service
    note: Mapped[str]  # empty: no note
    created_at: Mapped[datetime]


class EpochBreak(Base):
    """An acknowledged change: the series has a new level from this commit on."""

    __tablename__ = "epoch_break"
    __table_args__ = (UniqueConstraint("series_id", "alert_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))  # first on the new level
    alert_id: Mapped[int] = mapped_column(ForeignKey("alert.id"), index=True)


class ChangePoint(Base):
    """Change point of a series: the commit at which its level changed."""

    __tablename__ = "change_point"
    __table_args__ = (UniqueConstraint("series_id", "commit_id", "decision_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))  # first on the new level
    decision_id: Mapped[int] = mapped_column(ForeignKey("decision.id"))
    # Null: not part of an alert.
    alert_id: Mapped[int | None] = mapped_column(ForeignKey("alert.id"), index=True)
    before: Mapped[float]  # levels, in the unit of the series
    after: Mapped[float]
    retracted_at: Mapped[datetime | None]  # null: not retracted
    retraction_reason: Mapped[str | None]  # null: not retracted


# A/A calibration


class Noise(Base):
    """The noise of a series at one time. Sigmas are of ln(head / base) of the same commit."""

    __tablename__ = "noise"
    __table_args__ = (
        UniqueConstraint("series_id", "input_hash"),
        Index(None, "series_id", "computed_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    computed_at: Mapped[datetime]
    input_hash: Mapped[str]  # fingerprint of the decisions it was computed from
    comparisons: Mapped[int] = mapped_column(BigInteger)
    placements: Mapped[int] = mapped_column(BigInteger)
    blocks: Mapped[int] = mapped_column(BigInteger)
    block_sigma: Mapped[float | None]  # null: never two blocks in a placement
    placement_sigma: Mapped[float | None]  # null: never two placements
    comparison_sigma: Mapped[float | None]  # null: a single comparison
    estimate_sigma: Mapped[float]  # of the estimate of one comparison
    noise_floor: Mapped[float | None]  # null: too few comparisons
    smallest_step: Mapped[float | None]  # null: as noise_floor


class FalseAlarmRate(Base):
    """Rate at which a commit compared with itself was judged slower or faster."""

    __tablename__ = "false_alarm_rate"
    __table_args__ = (UniqueConstraint("input_hash"), Index(None, "until"))

    id: Mapped[int] = mapped_column(primary_key=True)
    since: Mapped[datetime]  # of the first comparison counted
    until: Mapped[datetime]  # of the last
    input_hash: Mapped[str]  # fingerprint of the decisions counted
    canaries: Mapped[int] = mapped_column(BigInteger)
    alarms: Mapped[int] = mapped_column(BigInteger)
    rate: Mapped[float]  # alarms per canary
    low: Mapped[float]  # bounds of the interval at `confidence`
    high: Mapped[float]
    confidence: Mapped[float]


# The fleet


class Worker(Base):
    """A process that measures on one device, from its start to its end."""

    __tablename__ = "worker"
    __table_args__ = (Index(None, "state", "heartbeat_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    host: Mapped[str]
    pid: Mapped[int] = mapped_column(BigInteger)
    gpu: Mapped[str]  # SKU; of a CPU its model name
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    state: Mapped[str]
    detail: Mapped[str]  # why it was lost; empty: it was not
    case_key: Mapped[str | None]  # case it measures; null: idle
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    lease_until: Mapped[datetime | None]  # of its job; null: it has none
    temperature_c: Mapped[float | None]  # null: not reported by the driver, or a CPU
    finished: Mapped[int] = mapped_column(BigInteger)  # finished jobs
    measuring_s: Mapped[float]  # seconds spent in cases


class Drain(Base):
    """A device or a host that finishes its jobs and gets no others, until it is resumed."""

    __tablename__ = "drain"

    id: Mapped[int] = mapped_column(primary_key=True)
    target: Mapped[str] = mapped_column(unique=True)  # a device's uuid or a host's name
    reason: Mapped[str]
    drained_by: Mapped[str]
    drained_at: Mapped[datetime]


class Job(Base):
    """A repetition of a planned case, or a comparison of commits, with lease and attempts."""

    __tablename__ = "job"
    __table_args__ = (
        UniqueConstraint("run_id", "case_key", "repetition"),
        Index(None, "state", "lease_until"),
        Index(None, "run_id", "state"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    kind: Mapped[str] = mapped_column(server_default="measure")  # or "compare"
    case_key: Mapped[str]  # of a comparison: base..head
    # index of the repetition, from 1; of a comparison: of the part of its cases
    repetition: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str]
    attempts: Mapped[int] = mapped_column(BigInteger)  # number of leases
    deaths: Mapped[int] = mapped_column(BigInteger)  # workers that died while they held it
    expected_s: Mapped[float | None]  # null: no similar case was measured before
    worker: Mapped[str | None]  # uuid of the last holder; null: never leased
    lease_until: Mapped[datetime | None]  # null: not leased
    heartbeat_at: Mapped[datetime | None]  # null: never leased
    reason: Mapped[str]  # of the quarantine, the refusal, the missing device, or the last death
    # the commits and cases to compare; null: the job measures a case
    content: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    # device and evidence of a comparison; null: it has no result, or the job measures a case
    outcome: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class Request(Base):
    """Request to the fleet for measurements: validated data, never code."""

    __tablename__ = "request"
    __table_args__ = (
        Index(None, "state", "created_at"),
        Index(None, "requester", "state"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    kind: Mapped[str]
    content: Mapped[dict[str, Any]] = mapped_column(JSON)
    requester: Mapped[str]
    gpu: Mapped[str]  # requested SKU; empty: any
    state: Mapped[str]
    cases: Mapped[int] = mapped_column(BigInteger)
    expected_s: Mapped[float | None]  # null: no similar case was measured before
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]  # null: not started
    finished_at: Mapped[datetime | None]  # null: not finished
    server: Mapped[str | None]  # last holder; null: never leased
    lease_until: Mapped[datetime | None]  # null: not leased
    # consecutive servers that died while they held it, without storing a result
    deaths: Mapped[int] = mapped_column(BigInteger, server_default="0")
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))  # null: no run yet
    detail: Mapped[str]  # error, or progress and result of a bisection; else empty


class TuningChoice(Base):
    """The fastest configuration on a GPU model, shared by all its workers."""

    __tablename__ = "tuning_choice"
    __table_args__ = (Index(None, "gpu"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key_hash: Mapped[str] = mapped_column(unique=True)  # of `key`
    gpu: Mapped[str]  # SKU
    key: Mapped[dict[str, Any]] = mapped_column(JSON)  # all inputs of the choice
    config: Mapped[dict[str, Any]] = mapped_column(JSON)
    chosen_at: Mapped[datetime]


class DeviceOffset(Base):
    """Slowdown of one GPU against the others of its SKU, from cases measured on several."""

    __tablename__ = "device_offset"
    __table_args__ = (UniqueConstraint("run_id", "device_id"), Index(None, "device_id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    cases: Mapped[int] = mapped_column(BigInteger)  # measured on it and another GPU
    log_offset: Mapped[float]  # median of ln(its time / mean of the GPUs'); 0.01 is 1 % slower
    low: Mapped[float]  # bounds of the 95 % interval
    high: Mapped[float]
    computed_at: Mapped[datetime]


class Night(Base):
    """A nightly run on one GPU model: its state and its report."""

    __tablename__ = "night"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(
        unique=True
    )  # name, suite and GPU; also the run's idempotency key
    name: Mapped[str] = mapped_column(index=True)  # usually a date
    suite: Mapped[str]
    gpu: Mapped[str]  # SKU
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    state: Mapped[str]
    report: Mapped[dict[str, Any]] = mapped_column(JSON)  # empty: not judged yet
    # what its jobs of comparisons don't say of the choice; null: nothing was chosen yet
    plan: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    updated_at: Mapped[datetime]


# Releases


class Release(Base):
    """A tag of a stored commit. A commit may have several; a project has each name once."""

    __tablename__ = "release"
    __table_args__ = (UniqueConstraint("name", "commit_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column()  # of the tag, for example v1.0.0
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"), index=True)


# Notifications


class Event(Base):
    """Event to notify of; written in the transaction of the data it reports."""

    __tablename__ = "event"
    __table_args__ = (Index(None, "addressed_at"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)  # deduplicates events
    kind: Mapped[str]
    severity: Mapped[str]
    subject: Mapped[str]
    body: Mapped[str]  # plain text
    kernels: Mapped[list[str]] = mapped_column(JSON)  # affected labels; empty: none
    gpus: Mapped[list[str]] = mapped_column(JSON)  # affected SKUs; empty: none
    content: Mapped[dict[str, Any]] = mapped_column(JSON)  # machine-readable
    created_at: Mapped[datetime]
    addressed_at: Mapped[datetime | None]  # null: not yet matched with subscriptions


class Delivery(Base):
    """Delivery of an event to one subscription."""

    __tablename__ = "delivery"
    __table_args__ = (UniqueConstraint("event_id", "subscription"), Index(None, "state", "due_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    event_id: Mapped[int] = mapped_column(ForeignKey("event.id"))
    subscription: Mapped[str]  # name; its address is not in the database
    state: Mapped[str]
    attempts: Mapped[int] = mapped_column(BigInteger)
    due_at: Mapped[datetime]  # earliest time of the next attempt; while sending: of another claim
    sent_at: Mapped[datetime | None]  # null: not yet
    detail: Mapped[str]  # error of the last attempt; empty: none failed


# The ingest API


class ApiToken(Base):
    """A token of the ingest API: what its bearer may do in one project.

    A rotated token is a new row of the same name; the earlier one expires.
    """

    __tablename__ = "api_token"
    __table_args__ = (Index(None, "project", "name"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str]  # empty: this repository
    name: Mapped[str]  # of its bearer, for example nightly
    rights: Mapped[str]  # read | write | admin; each includes those before it
    secret_hash: Mapped[str] = mapped_column(unique=True)  # SHA-256 of the token
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime | None]  # null: never
    revoked_at: Mapped[datetime | None]  # null: it is not


class ApiRequest(Base):
    """Audit of what bearers of tokens did, and the answers that repeated requests get again."""

    __tablename__ = "api_request"
    __table_args__ = (
        UniqueConstraint("project", "idempotency_key"),
        Index(None, "project", "created_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    project: Mapped[str]  # that was asked for; empty: this repository
    token_id: Mapped[int | None] = mapped_column(ForeignKey("api_token.id"))  # null: command line
    action: Mapped[str]  # import, token-create, token-rotate, token-revoke
    status: Mapped[int]  # of HTTP
    idempotency_key: Mapped[str | None]  # null: none was given, or nothing was stored
    content_hash: Mapped[str]  # SHA-256 of what was asked for; empty: no content
    content_bytes: Mapped[int] = mapped_column(BigInteger)
    client: Mapped[str]  # address; empty: command line
    answer: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime]

"""Tables of the fleet: workers, jobs, requests, tuned configurations, nightly runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


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


class Job(Base):
    """One repetition of a planned case, with its lease and its attempts."""

    __tablename__ = "job"
    __table_args__ = (
        UniqueConstraint("run_id", "case_key", "repetition"),
        Index(None, "state", "lease_until"),
        Index(None, "run_id", "state"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    case_key: Mapped[str]
    repetition: Mapped[int] = mapped_column(BigInteger)  # index of the repetition, from 1
    state: Mapped[str]
    attempts: Mapped[int] = mapped_column(BigInteger)  # number of leases
    deaths: Mapped[int] = mapped_column(BigInteger)  # workers that died while they held it
    expected_s: Mapped[float | None]  # null: no similar case was measured before
    worker: Mapped[str | None]  # uuid of the last holder; null: never leased
    lease_until: Mapped[datetime | None]  # null: not leased
    heartbeat_at: Mapped[datetime | None]  # null: never leased
    reason: Mapped[str]  # of the quarantine, the missing device, or the last death


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
    updated_at: Mapped[datetime]

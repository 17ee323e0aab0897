"""The fleet: who measures, what waits to be measured, what people ask for, what was learnt."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.tables.base import Base


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
    detail: Mapped[str]  # why it is lost; empty: it is not
    case_key: Mapped[str | None]  # what it measures; null: nothing
    started_at: Mapped[datetime]
    heartbeat_at: Mapped[datetime]
    lease_until: Mapped[datetime | None]  # of the job it holds; null: it holds none
    temperature_c: Mapped[float | None]  # null: the driver does not tell, or it is a CPU
    finished: Mapped[int] = mapped_column(BigInteger)  # jobs that it brought to an end
    measuring_s: Mapped[float]  # seconds spent in cases


class Job(Base):
    """The work on one planned case: who holds it, until when, how often it was tried."""

    __tablename__ = "job"
    __table_args__ = (
        UniqueConstraint("run_id", "case_key", "repetition"),
        Index(None, "state", "lease_until"),
        Index(None, "run_id", "state"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    case_key: Mapped[str]
    repetition: Mapped[int] = mapped_column(BigInteger)  # from 1: the case is measured so often
    state: Mapped[str]
    attempts: Mapped[int] = mapped_column(BigInteger)  # times that it was handed out
    deaths: Mapped[int] = mapped_column(BigInteger)  # workers that ended while they held it
    expected_s: Mapped[float | None]  # null: nothing like it was ever measured
    worker: Mapped[str | None]  # uuid of the last holder; null: nobody ever held it
    lease_until: Mapped[datetime | None]  # null: nobody holds it
    heartbeat_at: Mapped[datetime | None]  # null: nobody ever held it
    reason: Mapped[str]  # why it is quarantined or has no device; of a death: the last one's


class Request(Base):
    """Request to the fleet for measurements: data that was checked, never code."""

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
    gpu: Mapped[str]  # SKU asked for; empty: any
    state: Mapped[str]
    cases: Mapped[int] = mapped_column(BigInteger)
    expected_s: Mapped[float | None]  # null: nothing like it was ever measured
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]  # null: it waits
    finished_at: Mapped[datetime | None]  # null: it waits or is being measured
    server: Mapped[str | None]  # who serves it; null: nobody yet
    lease_until: Mapped[datetime | None]  # null: nobody serves it
    # servers in a row that ended while they held it, none of which stored a result
    deaths: Mapped[int] = mapped_column(BigInteger, server_default="0")
    run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))  # null: nothing measured yet
    detail: Mapped[str]  # why it failed, or how far a bisection is and what it found; else empty


class TuningChoice(Base):
    """The configuration that was fastest on a kind of GPU, for all its workers to start with."""

    __tablename__ = "tuning_choice"
    __table_args__ = (Index(None, "gpu"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    key_hash: Mapped[str] = mapped_column(unique=True)  # of `key`
    gpu: Mapped[str]  # SKU
    key: Mapped[dict[str, Any]] = mapped_column(JSON)  # all that the choice depends on
    config: Mapped[dict[str, Any]] = mapped_column(JSON)
    chosen_at: Mapped[datetime]


class DeviceOffset(Base):
    """Slowdown of one GPU against the others of its SKU, by cases that several measured."""

    __tablename__ = "device_offset"
    __table_args__ = (UniqueConstraint("run_id", "device_id"), Index(None, "device_id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    cases: Mapped[int] = mapped_column(BigInteger)  # that it shares with another GPU
    log_offset: Mapped[float]  # median of ln(its time / mean of the GPUs'); 0.01 is 1 % slower
    low: Mapped[float]  # of the 95 % interval
    high: Mapped[float]
    computed_at: Mapped[datetime]


class Night(Base):
    """One night's work on one kind of GPU: how far it is, and what it reported."""

    __tablename__ = "night"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(unique=True)  # name, suite and GPU: also the run's
    name: Mapped[str] = mapped_column(index=True)  # of the night, a date as a rule
    suite: Mapped[str]
    gpu: Mapped[str]  # SKU
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    state: Mapped[str]
    report: Mapped[dict[str, Any]] = mapped_column(JSON)  # empty: not concluded
    updated_at: Mapped[datetime]

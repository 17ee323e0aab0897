"""Tables of decisions and their inputs, alerts, and change points."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


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

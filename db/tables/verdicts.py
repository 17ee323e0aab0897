"""What was concluded from the numbers, so that it can be computed again."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.tables.base import Base


class Decision(Base):
    """One verdict, with all that it was made of."""

    __tablename__ = "decision"
    __table_args__ = (Index(None, "series_id", "created_at"), Index(None, "input_hash"))

    id: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str] = mapped_column(unique=True)
    series_id: Mapped[int | None] = mapped_column(ForeignKey("series.id"))  # null: of a whole run
    base_run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))  # null: history is base
    head_run_id: Mapped[int | None] = mapped_column(ForeignKey("run.id"))  # null: as base_run_id
    detector: Mapped[str]
    detector_version: Mapped[int]
    parameters: Mapped[dict[str, Any]] = mapped_column(JSON)  # the policy's thresholds, seeds
    input_hash: Mapped[str]  # fingerprint of the numbers judged
    verdict: Mapped[str]
    log_ratio: Mapped[float | None]  # ln(head / base); null: no-data or incorrect
    log_ratio_low: Mapped[float | None]  # of its 95 % interval; null: as log_ratio
    log_ratio_high: Mapped[float | None]  # null: as log_ratio
    created_at: Mapped[datetime]


class Alert(Base):
    """Something got worse between two commits; the series it touches share one group key."""

    __tablename__ = "alert"
    __table_args__ = (UniqueConstraint("group_key"), Index(None, "state", "opened_at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    group_key: Mapped[str]
    state: Mapped[str]
    # The last good one; null: bad since the first measurement.
    good_commit_id: Mapped[int | None] = mapped_column(ForeignKey("commit.id"))
    bad_commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))  # the first seen bad
    opened_at: Mapped[datetime]
    closed_at: Mapped[datetime | None]  # null: open
    note: Mapped[str]  # empty: nobody has said anything


class ChangePoint(Base):
    """Where the level of a series changed."""

    __tablename__ = "change_point"
    __table_args__ = (UniqueConstraint("series_id", "commit_id", "decision_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"))  # the first on the new level
    decision_id: Mapped[int] = mapped_column(ForeignKey("decision.id"))
    # Null: nobody was alerted.
    alert_id: Mapped[int | None] = mapped_column(ForeignKey("alert.id"), index=True)
    before: Mapped[float]  # levels, in the unit of the series
    after: Mapped[float]

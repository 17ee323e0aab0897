"""Tables of runs and of their plans."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


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


class PlannedCase(Base):
    """A case in the plan of a run; without a result for it, a gate returns `missing`."""

    __tablename__ = "planned_case"
    __table_args__ = (UniqueConstraint("run_id", "case_key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    position: Mapped[int] = mapped_column(BigInteger)  # in the plan, from 0
    case_key: Mapped[str]

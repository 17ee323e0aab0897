"""Tables of provenance: commit, device, environment."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Index, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class Commit(Base):
    """A commit of a project. Projects in the same repository have separate rows.

    A tree with local changes also has a row of its own (dirty), which is never a baseline.
    """

    __tablename__ = "commit"
    __table_args__ = (UniqueConstraint("sha", "dirty", "project"), Index(None, "topo_order"))

    id: Mapped[int] = mapped_column(primary_key=True)
    sha: Mapped[str]
    parent_sha: Mapped[str | None]  # null: the root commit, or unknown (installed wheel)
    topo_order: Mapped[int | None] = mapped_column(BigInteger)  # null: not in a git tree
    dirty: Mapped[bool]
    subject: Mapped[str]  # empty: unknown
    author: Mapped[str]  # empty: unknown
    committed_at: Mapped[datetime | None]  # null: unknown (installed wheel)
    # Name of an external project; empty: this repository.
    project: Mapped[str] = mapped_column(server_default="")


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

"""Table of releases."""

from __future__ import annotations

from sqlalchemy import ForeignKey, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from flexq_bench.db.tables.base import Base


class Release(Base):
    """A tag of a stored commit. A commit may have several; a project has each name once."""

    __tablename__ = "release"
    __table_args__ = (UniqueConstraint("name", "commit_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column()  # of the tag, for example v1.0.0
    commit_id: Mapped[int] = mapped_column(ForeignKey("commit.id"), index=True)

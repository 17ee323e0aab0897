"""Index for the newest decision of a series."""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_decision_series_id_created_at", "decision", ["series_id", "created_at"])

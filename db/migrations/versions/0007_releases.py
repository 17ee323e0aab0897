"""Releases: tags of stored commits.

What each column means is written at the model in db/tables.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "release",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False, index=True),
    )

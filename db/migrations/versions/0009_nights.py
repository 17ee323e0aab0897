"""Table of nightly runs: their states and reports.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "night",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.String, nullable=False, unique=True),
        sa.Column("name", sa.String, nullable=False, index=True),
        sa.Column("suite", sa.String, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("report", sa.JSON, nullable=False),
        sa.Column("updated_at", TIME, nullable=False),
    )

"""Column for the baseline of published ratios; index for the newest measurement of a series.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The table is empty before this revision, and SQLite can't add a NOT NULL column to a table:
    # recreate it.
    op.drop_table("reference_value")
    op.create_table(
        "reference_value",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String, nullable=False, unique=True),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("source_table", sa.String, nullable=False),
        sa.Column("kernel", sa.String, nullable=False),
        sa.Column("baseline", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("layer", sa.String, nullable=False),
        sa.Column("m", sa.BigInteger),
        sa.Column("n", sa.BigInteger),
        sa.Column("k", sa.BigInteger),
        sa.Column("suite", sa.String, nullable=False),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("unit", sa.String, nullable=False),
        sa.Column("bound", sa.String, nullable=False),
        sa.Column("hardware", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
    )
    op.create_index(
        "ix_measurement_series_id_created_at", "measurement", ["series_id", "created_at"]
    )

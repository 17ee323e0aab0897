"""Columns of decisions for everything that was decided, so that they need no code to be explained.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("decision", sa.Column("rule", sa.String, nullable=False, server_default=""))
    op.add_column("decision", sa.Column("numbers", sa.JSON))
    op.add_column("decision", sa.Column("decided_hash", sa.String))


def downgrade() -> None:
    with op.batch_alter_table("decision") as decision:
        for column in ("decided_hash", "numbers", "rule"):
            decision.drop_column(column)

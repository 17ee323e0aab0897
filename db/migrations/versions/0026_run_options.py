"""Column for the options that a run was started with, and a table of devices that get no work.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("options", sa.JSON))
    op.create_table(
        "drain",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("target", sa.String, nullable=False, unique=True),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("drained_by", sa.String, nullable=False),
        sa.Column("drained_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("drain")
    with op.batch_alter_table("run") as run:
        run.drop_column("options")

"""Columns for comparisons as jobs, and for the plan of a night's comparisons.

Existing jobs measure. A night in state measuring or comparing has no plan: it is planned when the
night is resumed. The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("kind", sa.String, nullable=False, server_default="measure"))
    op.add_column("job", sa.Column("content", sa.JSON))
    op.add_column("job", sa.Column("outcome", sa.JSON))
    op.add_column("night", sa.Column("plan", sa.JSON))


def downgrade() -> None:
    op.execute("DELETE FROM job WHERE kind <> 'measure'")
    with op.batch_alter_table("night") as night:
        night.drop_column("plan")
    with op.batch_alter_table("job") as job:
        for column in ("outcome", "content", "kind"):
            job.drop_column(column)

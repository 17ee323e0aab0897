"""Columns for retractions of change points.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("change_point", sa.Column("retracted_at", sa.DateTime(timezone=True)))
    op.add_column("change_point", sa.Column("retraction_reason", sa.String))

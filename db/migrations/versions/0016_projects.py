"""Columns for the external project of commits and series.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("series", "commit"):
        project = sa.Column("project", sa.String, nullable=False, server_default="")
        op.add_column(table, project)
    op.create_index("ix_series_project", "series", ["project"])

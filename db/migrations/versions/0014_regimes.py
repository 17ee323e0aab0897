"""Columns for the regime of a time, the gap before its samples, and the energy per launch.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurement", sa.Column("regime", sa.String))
    op.add_column("measurement", sa.Column("sample_gap_us", sa.Double))
    op.add_column("measurement", sa.Column("launch_j", sa.Double))

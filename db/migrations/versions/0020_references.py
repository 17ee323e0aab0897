"""Columns for a gate's reference and diagnosed losses, and for the placement of BOS tokens.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("accuracy_result", sa.Column("bos", sa.String))
    for name in ("reference", "reference_hash"):
        op.add_column("accuracy_gate", sa.Column(name, sa.String))
    op.add_column("accuracy_gate", sa.Column("diagnosis", sa.JSON))

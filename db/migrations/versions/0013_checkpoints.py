"""Columns for a result's checkpoint: content hash, scheme version, and `through`.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("accuracy_result", "accuracy_gate"):
        # Results before this revision were computed through the reference.
        through = sa.Column("through", sa.String, nullable=False, server_default="reference")
        op.add_column(table, through)
    for table in ("accuracy_result", "accuracy_gate", "decode_result", "serving_result"):
        op.add_column(table, sa.Column("content_hash", sa.String))
    for table in ("accuracy_result", "decode_result", "serving_result"):
        op.add_column(table, sa.Column("scheme_version", sa.BigInteger))
    for table in ("accuracy_result", "decode_result"):
        op.create_index(f"ix_{table}_content_hash", table, ["content_hash"])

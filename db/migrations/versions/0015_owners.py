"""Columns for the owner of a run in progress; one result per repetition of a case in a run.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("run", sa.Column("owner_host", sa.String))
    op.add_column("run", sa.Column("owner_pid", sa.BigInteger))
    op.add_column("run", sa.Column("owner_start", sa.String))
    op.add_column("measurement", sa.Column("repetition", sa.BigInteger))
    op.create_index(
        "ix_measurement_run_id_case_key_repetition",
        "measurement",
        ["run_id", "case_key", "repetition"],
        unique=True,
    )

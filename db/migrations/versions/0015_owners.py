"""Who owns a run that is under way; one result for each repetition of a case in a run.

What each column means, and what null means in it, is written at the models in db/tables.
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

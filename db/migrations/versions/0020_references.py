"""What an accuracy gate compared with and where a model lost, and where the BOS token went.

What each column means, and what null means in it, is written at the models in db/tables.
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

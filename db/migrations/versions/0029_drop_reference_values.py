"""Drop the copy of published numbers, which are read from the package's files.

The way back makes the empty table of revision 0006: versions that read it fill it from their files.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_TEXTS = ("source", "source_table", "kernel", "baseline", "model", "layer")
_OTHER_TEXTS = ("unit", "bound", "hardware", "note")


def upgrade() -> None:
    op.drop_table("reference_value")


def downgrade() -> None:
    op.create_table(
        "reference_value",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String, nullable=False, unique=True),
        *(sa.Column(name, sa.String, nullable=False) for name in _TEXTS),
        *(sa.Column(name, sa.BigInteger) for name in "mnk"),
        *(sa.Column(name, sa.String, nullable=False) for name in ("suite", "metric", "task")),
        sa.Column("value", sa.Double, nullable=False),
        *(sa.Column(name, sa.String, nullable=False) for name in _OTHER_TEXTS),
    )

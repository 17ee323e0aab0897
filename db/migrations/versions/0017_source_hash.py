"""Column for the hash of the sources of a kernel from outside of the repository.

What the column means, and what null means in it, is written at the models in db/tables.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("measurement", sa.Column("source_hash", sa.String))

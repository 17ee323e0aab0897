"""How many servers in a row ended while they held a request.

What each column means, and what null means in it, is written at the models in db/tables.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    deaths = sa.Column("deaths", sa.BigInteger, nullable=False, server_default="0")
    op.add_column("request", deaths)

"""Column for the number of consecutive servers that died while they held a request.

The models in db/tables document the columns, and the meaning of null in each.
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

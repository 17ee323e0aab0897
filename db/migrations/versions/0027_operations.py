"""Columns of series for the operation and its parameters; m, n and k are of linear layers only.

The models in db/tables document the columns, and the meaning of null in each. Keys of series
(identity_hash) stay as they are.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_SIZES = ("m", "n", "k")


def upgrade() -> None:
    with op.batch_alter_table("series") as series:
        column = sa.Column("operation", sa.String, nullable=False, server_default="linear")
        series.add_column(column)
        series.add_column(sa.Column("parameters", sa.String, nullable=False, server_default=""))
        for name in _SIZES:
            series.alter_column(name, existing_type=sa.BigInteger, nullable=True)
        series.create_index("ix_series_operation", ["operation"])
    # What had no shape had the size 1.
    op.execute(
        "UPDATE series SET operation = '', m = NULLIF(m, 1), n = NULLIF(n, 1), k = NULLIF(k, 1) "
        "WHERE backend IN ('outside', 'static') AND (n = 1 OR k = 1)"
    )
    texts = (f"COALESCE(' {name}=' || CAST({name} AS VARCHAR), '')" for name in _SIZES)
    op.execute(f"UPDATE series SET parameters = LTRIM({' || '.join(texts)})")


def downgrade() -> None:
    op.execute("UPDATE series SET m = COALESCE(m, 1), n = COALESCE(n, 1), k = COALESCE(k, 1)")
    with op.batch_alter_table("series") as series:
        series.drop_index("ix_series_operation")
        for name in _SIZES:
            series.alter_column(name, existing_type=sa.BigInteger, nullable=False)
        series.drop_column("parameters")
        series.drop_column("operation")

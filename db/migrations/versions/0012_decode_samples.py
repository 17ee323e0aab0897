"""Table of decode measurements by process; columns for the time to first token of requests.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "decode_sample",
        sa.Column(
            "decode_result_id", sa.Integer, sa.ForeignKey("decode_result.id"), primary_key=True
        ),
        sa.Column("number", sa.BigInteger, primary_key=True),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("prefill_ms", sa.Double, nullable=False),
        sa.Column("steady_memory_bytes", sa.BigInteger),
        sa.Column("peak_memory_bytes", sa.BigInteger),
        sa.Column("energy_j", sa.Double),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.add_column("serving_result", sa.Column("ttft_p50_ms", sa.Double))
    op.add_column("serving_result", sa.Column("ttft_p95_ms", sa.Double))

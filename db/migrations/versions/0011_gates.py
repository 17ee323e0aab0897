"""Table of the decisions of accuracy gates.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "accuracy_gate",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False, index=True),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("device_id", sa.Integer, sa.ForeignKey("device.id"), nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environment.id"), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("model_hash", sa.String, nullable=False),
        sa.Column("scheme", sa.String, nullable=False),
        sa.Column("base", sa.String, nullable=False),
        sa.Column("policy", sa.String, nullable=False),
        sa.Column("policy_version", sa.BigInteger, nullable=False),
        sa.Column("policy_hash", sa.String, nullable=False),
        sa.Column("verdict", sa.String, nullable=False),
        sa.Column("exit_code", sa.BigInteger, nullable=False),
        sa.Column("limits", sa.JSON, nullable=False),
    )
    op.create_index("ix_accuracy_gate_model_created_at", "accuracy_gate", ["model", "created_at"])

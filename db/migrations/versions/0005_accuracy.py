"""Tables of accuracy results, and of their values by segment or question.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    # The table is empty before this revision, and SQLite can't add a NOT NULL column to a table:
    # recreate it.
    op.drop_table("accuracy_result")
    op.create_table(
        "accuracy_result",
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
        sa.Column("task", sa.String, nullable=False),
        sa.Column("task_version", sa.String, nullable=False),
        sa.Column("data_hash", sa.String, nullable=False),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("direction", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("standard_error", sa.Double),
        sa.Column("n_items", sa.BigInteger, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
    )
    op.create_index(
        "ix_accuracy_result_model_scheme_task", "accuracy_result", ["model", "scheme", "task"]
    )
    op.create_table(
        "accuracy_sample",
        sa.Column(
            "accuracy_result_id", sa.Integer, sa.ForeignKey("accuracy_result.id"), primary_key=True
        ),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )

"""Tables of the outbox: events and their deliveries.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "event",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.String, nullable=False, unique=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("severity", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.Column("gpus", sa.JSON, nullable=False),
        sa.Column("content", sa.JSON, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("addressed_at", TIME),
    )
    op.create_index("ix_event_addressed_at", "event", ["addressed_at"])
    op.create_table(
        "delivery",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("event_id", sa.Integer, sa.ForeignKey("event.id"), nullable=False),
        sa.Column("subscription", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("due_at", TIME, nullable=False),
        sa.Column("sent_at", TIME),
        sa.Column("detail", sa.String, nullable=False),
        sa.UniqueConstraint("event_id", "subscription", name="uq_delivery_event_id_subscription"),
    )
    op.create_index("ix_delivery_state_due_at", "delivery", ["state", "due_at"])

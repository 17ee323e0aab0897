"""Tables of the ingest API: tokens of projects, and the audit of requests.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_token",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("rights", sa.String, nullable=False),
        sa.Column("secret_hash", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.Column("revoked_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_api_token"),
        sa.UniqueConstraint("secret_hash", name="uq_api_token_secret_hash"),
    )
    op.create_index("ix_api_token_project_name", "api_token", ["project", "name"])
    op.create_table(
        "api_request",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("token_id", sa.Integer),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("idempotency_key", sa.String),
        sa.Column("content_hash", sa.String, nullable=False),
        sa.Column("content_bytes", sa.BigInteger, nullable=False),
        sa.Column("client", sa.String, nullable=False),
        sa.Column("answer", sa.JSON, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_request"),
        sa.ForeignKeyConstraint(
            ["token_id"], ["api_token.id"], name="fk_api_request_token_id_api_token"
        ),
        sa.UniqueConstraint(
            "project", "idempotency_key", name="uq_api_request_project_idempotency_key"
        ),
    )
    op.create_index("ix_api_request_project_created_at", "api_request", ["project", "created_at"])


def downgrade() -> None:
    op.drop_table("api_request")
    op.drop_table("api_token")

"""Decode results with their parts, energy and memory; serving results.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The table is empty before this revision, and SQLite can't add a NOT NULL column to a table:
    # recreate it.
    op.drop_table("decode_result")
    op.create_table(
        "decode_result",
        *_shared(),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("new_tokens", sa.BigInteger, nullable=False),
        *_outcome(),
        sa.Column("prefill_ms", sa.Double),
        sa.Column("token_ms", sa.Double),
        sa.Column("token_ci_low_ms", sa.Double),
        sa.Column("token_ci_high_ms", sa.Double),
        sa.Column("token_p95_ms", sa.Double),
        sa.Column("process_medians_ms", sa.JSON, nullable=False),
        sa.Column("tokens_per_s", sa.Double),
        sa.Column("peak_memory_bytes", sa.BigInteger),
        sa.Column("energy_j_per_token", sa.Double),
        sa.Column("parts", sa.JSON, nullable=False),
    )
    op.create_table(
        "serving_result",
        *_shared(),
        sa.Column("batch_limit", sa.BigInteger, nullable=False),
        sa.Column("memory_limit_bytes", sa.BigInteger),
        sa.Column("requests", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("new_tokens", sa.BigInteger, nullable=False),
        sa.Column("lengths", sa.String, nullable=False),
        *_outcome(),
        sa.Column("tokens_per_s", sa.Double),
        sa.Column("latency_p50_s", sa.Double),
        sa.Column("latency_p95_s", sa.Double),
        sa.Column("latency_p99_s", sa.Double),
        sa.Column("token_p50_ms", sa.Double),
        sa.Column("token_p95_ms", sa.Double),
    )
    for table in ("decode_result", "serving_result"):
        op.create_index(f"ix_{table}_model_scheme", table, ["model", "scheme"])
        op.create_index(f"ix_{table}_run_id", table, ["run_id"])


def _shared() -> list[sa.Column[object]]:
    return [
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("device_id", sa.Integer, sa.ForeignKey("device.id"), nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environment.id"), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("case_key", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("weights", sa.String, nullable=False),
        sa.Column("scheme", sa.String, nullable=False),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.Column("backend", sa.String, nullable=False),
        sa.Column("kv_bits", sa.BigInteger, nullable=False),
    ]


def _outcome() -> list[sa.Column[object]]:
    return [
        sa.Column("protocol_version", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("weights_bytes", sa.BigInteger),
        sa.Column("steady_memory_bytes", sa.BigInteger),
        sa.Column("parameters", sa.JSON, nullable=False),
    ]

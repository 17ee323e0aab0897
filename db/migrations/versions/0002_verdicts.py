"""Results of whole models, published numbers, decisions, alerts and change points.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    _model_results()
    _verdicts()


def _model_results() -> None:
    op.create_table(
        "accuracy_result",
        *_provenance(),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("model_hash", sa.String, nullable=False),
        sa.Column("scheme", sa.String, nullable=False),
        sa.Column("task", sa.String, nullable=False),
        sa.Column("task_version", sa.String, nullable=False),
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
    op.create_index("ix_accuracy_result_run_id", "accuracy_result", ["run_id"])
    op.create_table(
        "decode_result",
        *_provenance(),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("scheme", sa.String, nullable=False),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("new_tokens", sa.BigInteger, nullable=False),
        sa.Column("protocol_version", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("prefill_ms", sa.Double),
        sa.Column("token_ms", sa.Double),
        sa.Column("token_ci_low_ms", sa.Double),
        sa.Column("token_ci_high_ms", sa.Double),
        sa.Column("tokens_per_s", sa.Double),
        sa.Column("peak_memory_bytes", sa.BigInteger),
        sa.Column("parameters", sa.JSON, nullable=False),
    )
    op.create_index("ix_decode_result_model_scheme", "decode_result", ["model", "scheme"])
    op.create_index("ix_decode_result_run_id", "decode_result", ["run_id"])
    op.create_table(
        "reference_value",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String, nullable=False, unique=True),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("source_table", sa.String, nullable=False),
        sa.Column("kernel", sa.String, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("layer", sa.String, nullable=False),
        sa.Column("m", sa.BigInteger),
        sa.Column("n", sa.BigInteger),
        sa.Column("k", sa.BigInteger),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("unit", sa.String, nullable=False),
        sa.Column("hardware", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
    )


def _provenance() -> tuple[sa.Column[object], ...]:
    return (
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("device_id", sa.Integer, sa.ForeignKey("device.id"), nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environment.id"), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )


def _verdicts() -> None:
    op.create_table(
        "decision",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id")),
        sa.Column("base_run_id", sa.Integer, sa.ForeignKey("run.id")),
        sa.Column("head_run_id", sa.Integer, sa.ForeignKey("run.id")),
        sa.Column("detector", sa.String, nullable=False),
        sa.Column("detector_version", sa.Integer, nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("input_hash", sa.String, nullable=False),
        sa.Column("verdict", sa.String, nullable=False),
        sa.Column("log_ratio", sa.Double),
        sa.Column("log_ratio_low", sa.Double),
        sa.Column("log_ratio_high", sa.Double),
        sa.Column("created_at", TIME, nullable=False),
    )
    op.create_index("ix_decision_series_id_created_at", "decision", ["series_id", "created_at"])
    op.create_index("ix_decision_input_hash", "decision", ["input_hash"])
    op.create_table(
        "alert",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("group_key", sa.String, nullable=False, unique=True),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("good_commit_id", sa.Integer, sa.ForeignKey("commit.id")),
        sa.Column("bad_commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("opened_at", TIME, nullable=False),
        sa.Column("closed_at", TIME),
        sa.Column("note", sa.String, nullable=False),
    )
    op.create_index("ix_alert_state_opened_at", "alert", ["state", "opened_at"])
    op.create_table(
        "change_point",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id"), nullable=False),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("decision_id", sa.Integer, sa.ForeignKey("decision.id"), nullable=False),
        sa.Column("alert_id", sa.Integer, sa.ForeignKey("alert.id")),
        sa.Column("before", sa.Double, nullable=False),
        sa.Column("after", sa.Double, nullable=False),
        sa.UniqueConstraint("series_id", "commit_id", "decision_id"),
    )
    op.create_index("ix_change_point_alert_id", "change_point", ["alert_id"])

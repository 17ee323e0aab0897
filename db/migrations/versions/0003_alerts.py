"""Evidence of decisions, events of alerts, epochs of explained changes, and A/A calibration.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    # These three tables are empty before this revision, and SQLite can't add a NOT NULL column to
    # a table: recreate them.
    for table in ("change_point", "decision", "alert"):
        op.drop_table(table)
    _alerts()
    _decisions()
    _epoch_breaks()
    _noise()


def _alerts() -> None:
    op.create_table(
        "alert",
        _id(),
        sa.Column("group_key", sa.String, nullable=False, unique=True),
        sa.Column("family", sa.String, nullable=False, index=True),
        sa.Column("state", sa.String, nullable=False),
        _reference("good_commit_id", "commit", nullable=True),
        _reference("bad_commit_id", "commit"),
        sa.Column("opened_at", TIME, nullable=False),
        sa.Column("closed_at", TIME),
        sa.Column("note", sa.String, nullable=False),
    )
    op.create_index("ix_alert_state_opened_at", "alert", ["state", "opened_at"])
    op.create_table(
        "alert_event",
        _id(),
        _reference("alert_id", "alert"),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("person", sa.String, nullable=False),
        sa.Column("note", sa.String, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )
    op.create_index("ix_alert_event_alert_id_created_at", "alert_event", ["alert_id", "created_at"])


def _decisions() -> None:
    op.create_table(
        "decision",
        _id(),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        _reference("series_id", "series", nullable=True),
        _reference("base_commit_id", "commit", nullable=True),
        _reference("head_commit_id", "commit", index=True),
        _reference("device_id", "device", nullable=True),
        _reference("base_run_id", "run", nullable=True),
        _reference("head_run_id", "run", nullable=True),
        _reference("alert_id", "alert", nullable=True, index=True),
        sa.Column("watched", sa.Boolean, nullable=False),
        sa.Column("detector", sa.String, nullable=False),
        sa.Column("detector_version", sa.Integer, nullable=False),
        sa.Column("parameters", sa.JSON, nullable=False),
        sa.Column("input_hash", sa.String, nullable=False),
        sa.Column("verdict", sa.String, nullable=False),
        sa.Column("cause", sa.String, nullable=False),
        sa.Column("reason", sa.String, nullable=False),
        sa.Column("log_ratio", sa.Double),
        sa.Column("log_ratio_low", sa.Double),
        sa.Column("log_ratio_high", sa.Double),
        sa.Column("created_at", TIME, nullable=False),
    )
    op.create_index(
        "ix_decision_series_id_base_commit_id", "decision", ["series_id", "base_commit_id"]
    )
    op.create_index("ix_decision_created_at", "decision", ["created_at"])
    op.create_index("ix_decision_input_hash", "decision", ["input_hash"])
    op.create_table(
        "decision_evidence",
        sa.Column("decision_id", sa.Integer, sa.ForeignKey("decision.id"), primary_key=True),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "change_point",
        _id(),
        _reference("series_id", "series"),
        _reference("commit_id", "commit"),
        _reference("decision_id", "decision"),
        _reference("alert_id", "alert", nullable=True, index=True),
        sa.Column("before", sa.Double, nullable=False),
        sa.Column("after", sa.Double, nullable=False),
        sa.UniqueConstraint("series_id", "commit_id", "decision_id"),
    )


def _epoch_breaks() -> None:
    op.create_table(
        "epoch_break",
        _id(),
        _reference("series_id", "series"),
        _reference("commit_id", "commit"),
        _reference("alert_id", "alert", index=True),
        sa.UniqueConstraint("series_id", "alert_id"),
    )


def _noise() -> None:
    op.create_table(
        "noise",
        _id(),
        _reference("series_id", "series"),
        sa.Column("computed_at", TIME, nullable=False),
        sa.Column("input_hash", sa.String, nullable=False),
        sa.Column("comparisons", sa.BigInteger, nullable=False),
        sa.Column("placements", sa.BigInteger, nullable=False),
        sa.Column("blocks", sa.BigInteger, nullable=False),
        sa.Column("block_sigma", sa.Double),
        sa.Column("placement_sigma", sa.Double),
        sa.Column("comparison_sigma", sa.Double),
        sa.Column("estimate_sigma", sa.Double, nullable=False),
        sa.Column("noise_floor", sa.Double),
        sa.Column("smallest_step", sa.Double),
        sa.UniqueConstraint("series_id", "input_hash"),
    )
    op.create_index("ix_noise_series_id_computed_at", "noise", ["series_id", "computed_at"])
    op.create_table(
        "false_alarm_rate",
        _id(),
        sa.Column("since", TIME, nullable=False),
        sa.Column("until", TIME, nullable=False, index=True),
        sa.Column("input_hash", sa.String, nullable=False, unique=True),
        sa.Column("canaries", sa.BigInteger, nullable=False),
        sa.Column("alarms", sa.BigInteger, nullable=False),
        sa.Column("rate", sa.Double, nullable=False),
        sa.Column("low", sa.Double, nullable=False),
        sa.Column("high", sa.Double, nullable=False),
        sa.Column("confidence", sa.Double, nullable=False),
    )


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _reference(
    name: str, table: str, *, nullable: bool = False, index: bool = False
) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, sa.ForeignKey(f"{table}.id"), nullable=nullable, index=index)

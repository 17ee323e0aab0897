"""Tables of workers, jobs with expected times, requests, tuned configurations, GPU offsets.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    # The table is empty before this revision, and SQLite can't add a NOT NULL column to a table:
    # recreate it.
    op.drop_table("job")
    _jobs()
    _workers()
    _requests()
    _tuning_and_offsets()


def _jobs() -> None:
    op.create_table(
        "job",
        _id(),
        _reference("run_id", "run"),
        sa.Column("case_key", sa.String, nullable=False),
        sa.Column("repetition", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("deaths", sa.BigInteger, nullable=False),
        sa.Column("expected_s", sa.Double),
        sa.Column("worker", sa.String),
        sa.Column("lease_until", TIME),
        sa.Column("heartbeat_at", TIME),
        sa.Column("reason", sa.String, nullable=False),
        sa.UniqueConstraint("run_id", "case_key", "repetition"),
    )
    op.create_index("ix_job_state_lease_until", "job", ["state", "lease_until"])
    op.create_index("ix_job_run_id_state", "job", ["run_id", "state"])


def _workers() -> None:
    op.create_table(
        "worker",
        _id(),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("host", sa.String, nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        _reference("device_id", "device"),
        _reference("environment_id", "environment"),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("case_key", sa.String),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("heartbeat_at", TIME, nullable=False),
        sa.Column("lease_until", TIME),
        sa.Column("temperature_c", sa.Double),
        sa.Column("finished", sa.BigInteger, nullable=False),
        sa.Column("measuring_s", sa.Double, nullable=False),
    )
    op.create_index("ix_worker_state_heartbeat_at", "worker", ["state", "heartbeat_at"])


def _requests() -> None:
    op.create_table(
        "request",
        _id(),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("content", sa.JSON, nullable=False),
        sa.Column("requester", sa.String, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("cases", sa.BigInteger, nullable=False),
        sa.Column("expected_s", sa.Double),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("finished_at", TIME),
        sa.Column("server", sa.String),
        sa.Column("lease_until", TIME),
        _reference("run_id", "run", nullable=True),
        sa.Column("detail", sa.String, nullable=False),
    )
    op.create_index("ix_request_state_created_at", "request", ["state", "created_at"])
    op.create_index("ix_request_requester_state", "request", ["requester", "state"])


def _tuning_and_offsets() -> None:
    op.create_table(
        "tuning_choice",
        _id(),
        sa.Column("key_hash", sa.String, nullable=False, unique=True),
        sa.Column("gpu", sa.String, nullable=False, index=True),
        sa.Column("key", sa.JSON, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("chosen_at", TIME, nullable=False),
    )
    op.create_table(
        "device_offset",
        _id(),
        _reference("run_id", "run"),
        _reference("device_id", "device", index=True),
        sa.Column("cases", sa.BigInteger, nullable=False),
        sa.Column("log_offset", sa.Double, nullable=False),
        sa.Column("low", sa.Double, nullable=False),
        sa.Column("high", sa.Double, nullable=False),
        sa.Column("computed_at", TIME, nullable=False),
        sa.UniqueConstraint("run_id", "device_id"),
    )


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True)


def _reference(
    name: str, table: str, *, nullable: bool = False, index: bool = False
) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, sa.ForeignKey(f"{table}.id"), nullable=nullable, index=index)

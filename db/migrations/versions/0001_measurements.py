"""Tables of provenance, runs, series, measurements and their samples.

The models in db/tables document the columns, and the meaning of null in each.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    _provenance()
    _series_and_runs()
    _measurements()


def _provenance() -> None:
    op.create_table(
        "commit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("sha", sa.String, nullable=False),
        sa.Column("parent_sha", sa.String),
        sa.Column("topo_order", sa.BigInteger),
        sa.Column("dirty", sa.Boolean, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("author", sa.String, nullable=False),
        sa.Column("committed_at", TIME),
        sa.UniqueConstraint("sha", "dirty"),
    )
    op.create_index("ix_commit_topo_order", "commit", ["topo_order"])
    op.create_table(
        "device",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String, nullable=False, unique=True),
        sa.Column("uuid", sa.String, nullable=False),
        sa.Column("sku", sa.String, nullable=False),
        sa.Column("backend", sa.String, nullable=False),
        sa.Column("vbios", sa.String),
        sa.Column("power_limit_w", sa.Double),
        sa.Column("ecc", sa.Boolean),
        sa.Column("mig", sa.Boolean),
        sa.Column("memory_bytes", sa.BigInteger),
        sa.Column("l2_bytes", sa.BigInteger),
        sa.Column("sm_count", sa.BigInteger),
        sa.Column("compute_capability", sa.String),
    )
    op.create_index("ix_device_uuid", "device", ["uuid"])
    op.create_table(
        "environment",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("fingerprint", sa.String, nullable=False, unique=True),
        sa.Column("content", sa.JSON, nullable=False),
    )


def _series_and_runs() -> None:
    op.create_table(
        "series",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("identity_hash", sa.String, nullable=False, unique=True),
        sa.Column("kernel", sa.String, nullable=False),
        sa.Column("kernel_version", sa.BigInteger, nullable=False),
        sa.Column("variant", sa.String, nullable=False),
        sa.Column("backend", sa.String, nullable=False),
        sa.Column("stage", sa.String, nullable=False),
        sa.Column("cache", sa.String, nullable=False),
        sa.Column("metric", sa.String, nullable=False),
        sa.Column("unit", sa.String, nullable=False),
        sa.Column("direction", sa.String, nullable=False),
        sa.Column("m", sa.BigInteger, nullable=False),
        sa.Column("n", sa.BigInteger, nullable=False),
        sa.Column("k", sa.BigInteger, nullable=False),
        sa.Column("weight_bits", sa.BigInteger, nullable=False),
        sa.Column("act_bits", sa.BigInteger, nullable=False),
        sa.Column("group", sa.BigInteger),
        sa.Column("input_distribution", sa.String, nullable=False),
        sa.Column("protocol_version", sa.BigInteger, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
    )
    op.create_index("ix_series_kernel_gpu", "series", ["kernel", "gpu"])
    op.create_index("ix_series_gpu", "series", ["gpu"])
    op.create_table(
        "run",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("idempotency_key", sa.String, nullable=False, unique=True),
        sa.Column("suite", sa.String, nullable=False),
        sa.Column("trigger", sa.String, nullable=False),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("finished_at", TIME),
    )
    op.create_index("ix_run_status_created_at", "run", ["status", "created_at"])
    op.create_index("ix_run_created_at", "run", ["created_at"])
    op.create_table(
        "planned_case",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("case_key", sa.String, nullable=False),
        sa.UniqueConstraint("run_id", "case_key"),
    )
    op.create_table(
        "job",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("case_key", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("lease_until", TIME),
        sa.Column("heartbeat_at", TIME),
        sa.Column("worker", sa.String),
        sa.UniqueConstraint("run_id", "case_key"),
    )
    op.create_index("ix_job_state_lease_until", "job", ["state", "lease_until"])
    op.create_table(
        "epoch",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id"), nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environment.id"), nullable=False),
        sa.Column("first_run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("opened_at", TIME, nullable=False),
        sa.UniqueConstraint("series_id", "environment_id"),
    )


def _measurements() -> None:
    op.create_table(
        "measurement",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("uuid", sa.String, nullable=False, unique=True),
        sa.Column("run_id", sa.Integer, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("case_key", sa.String, nullable=False),
        sa.Column("series_id", sa.Integer, sa.ForeignKey("series.id"), nullable=False),
        sa.Column("epoch_id", sa.Integer, sa.ForeignKey("epoch.id"), nullable=False),
        sa.Column("commit_id", sa.Integer, sa.ForeignKey("commit.id"), nullable=False),
        sa.Column("device_id", sa.Integer, sa.ForeignKey("device.id"), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("layer", sa.String, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("detail", sa.String, nullable=False),
        sa.Column("accepted", sa.Boolean, nullable=False),
        sa.Column("median_us", sa.Double),
        sa.Column("ci_low_us", sa.Double),
        sa.Column("ci_high_us", sa.Double),
        sa.Column("n_samples", sa.BigInteger, nullable=False),
        sa.Column("n_invalid", sa.BigInteger, nullable=False),
        sa.Column("placement_medians_us", sa.JSON, nullable=False),
        sa.Column("floor_us", sa.Double),
        sa.Column("pct_of_floor", sa.Double),
        sa.Column("launch_us", sa.Double),
        sa.Column("tops", sa.Double),
        sa.Column("max_rel_error", sa.Double),
        sa.Column("exact", sa.Boolean),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("binary_hash", sa.String),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("sm_clock_mhz", sa.Double),
        sa.Column("mem_clock_mhz", sa.Double),
        sa.Column("power_w", sa.Double),
        sa.Column("temperature_c", sa.Double),
        sa.Column("throttle_mask", sa.BigInteger),
        sa.Column("extra", sa.JSON, nullable=False),
    )
    for columns in (
        ["series_id", "commit_id"],
        ["run_id", "case_key", "created_at"],
        ["status", "created_at"],
        ["created_at"],
        ["model", "layer"],
    ):
        op.create_index("ix_measurement_" + "_".join(columns), "measurement", columns)
    op.create_table(
        "sample",
        sa.Column("measurement_id", sa.Integer, sa.ForeignKey("measurement.id"), primary_key=True),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.Column("placement_counts", sa.JSON, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )

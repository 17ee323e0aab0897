"""Parents of commits, branches, and the places of commits on them.

Commits keep their order: the counts of first parents that were stored are their places, and commits
without one follow. The models in db/tables document the columns.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_commit_topo_order", "commit")
    branch = sa.Column("branch", sa.String, nullable=False, server_default="")
    op.add_column("commit", branch)
    op.add_column("commit", sa.Column("position", sa.BigInteger))
    op.add_column("commit", sa.Column("orphaned_at", sa.DateTime(timezone=True)))
    op.create_index("ix_commit_position", "commit", ["position"])
    op.create_table(
        "commit_parent",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("sha", sa.String, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("parent_sha", sa.String),
        sa.UniqueConstraint("project", "sha", "number", name="uq_commit_parent_project_sha_number"),
    )
    op.create_index(
        "ix_commit_parent_project_parent_sha", "commit_parent", ["project", "parent_sha"]
    )
    op.create_table(
        "branch",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("project", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("is_main", sa.Boolean, nullable=False),
        sa.Column("tip_sha", sa.String),
        sa.Column("tip_at", sa.DateTime(timezone=True)),
        sa.Column("closed_at", sa.DateTime(timezone=True)),
        sa.Column("fork_position", sa.BigInteger),
        sa.Column("note", sa.String, nullable=False, server_default=""),
        sa.Column("noted_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("project", "name", name="uq_branch_project_name"),
    )
    op.create_table(
        "branch_commit",
        sa.Column("branch_id", sa.Integer, nullable=False),
        sa.Column("commit_id", sa.Integer, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("branch_id", "commit_id", name="pk_branch_commit"),
        sa.ForeignKeyConstraint(["branch_id"], ["branch.id"], name="fk_branch_commit_branch_id"),
        sa.ForeignKeyConstraint(["commit_id"], ["commit.id"], name="fk_branch_commit_commit_id"),
    )
    op.create_index("ix_branch_commit_commit_id", "branch_commit", ["commit_id"])
    op.execute(
        'INSERT INTO "branch" (project, name, is_main) '
        "SELECT DISTINCT project, '', true FROM \"commit\""
    )
    op.execute('UPDATE "commit" SET position = topo_order')
    # Those without a count come last, as until here: by their number.
    op.execute(
        'UPDATE "commit" SET position = id + COALESCE('
        '(SELECT MAX(c.topo_order) FROM "commit" c WHERE c.project = "commit".project), 0) '
        "WHERE position IS NULL"
    )


def downgrade() -> None:
    for table in ("branch_commit", "branch", "commit_parent"):
        op.drop_table(table)
    op.drop_index("ix_commit_position", "commit")
    with op.batch_alter_table("commit") as commit:
        for column in ("orphaned_at", "position", "branch"):
            commit.drop_column(column)
    op.create_index("ix_commit_topo_order", "commit", ["topo_order"])

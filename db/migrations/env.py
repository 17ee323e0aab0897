"""Alembic's entry point: runs the revisions on the connection of db.schema."""

from __future__ import annotations

from alembic import context

from flexq_bench.db.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()

"""Alembic environment; `versions/` has the revisions of the schema."""

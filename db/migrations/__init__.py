"""The Alembic environment: `versions/` is the history of the tables, oldest first."""

"""Rows of commits of their own for each project, also where projects share a repository.

Until here the first project that stored a commit named it; results of others referred to that row.
The models in db/tables document the columns.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_OF_SERIES = '(SELECT s.project FROM series s WHERE s.id = "{table}".series_id)'
_OF_ALERT = (
    "(SELECT MIN(s.project) FROM decision d JOIN series s ON s.id = d.series_id "
    'WHERE d.alert_id = "{table}".id)'
)
# A run without results, of devices that were absent, is known by its suite: those of a project
# begin with its name.
_OF_RUN = """COALESCE(
    (SELECT MIN(s.project) FROM measurement m JOIN series s ON s.id = m.series_id
     WHERE m.run_id = "{table}".id),
    (SELECT MIN('') FROM accuracy_result r WHERE r.run_id = "{table}".id),
    (SELECT MIN('') FROM decode_result r WHERE r.run_id = "{table}".id),
    (SELECT MIN('') FROM serving_result r WHERE r.run_id = "{table}".id),
    (SELECT MIN('') FROM accuracy_gate r WHERE r.run_id = "{table}".id),
    (SELECT p.project FROM (SELECT DISTINCT project FROM series WHERE project <> '') p
     WHERE "{table}".suite = p.project
        OR substr("{table}".suite, 1, length(p.project) + 1) = p.project || '.'
     ORDER BY length(p.project) DESC LIMIT 1),
    '')"""
# Table, its column that refers to a commit, and the project of a row; null: not known.
_REFERENCES = (
    ("run", "commit_id", _OF_RUN),
    ("measurement", "commit_id", _OF_SERIES),
    ("decision", "base_commit_id", _OF_SERIES),
    ("decision", "head_commit_id", _OF_SERIES),
    ("alert", "good_commit_id", _OF_ALERT),
    ("alert", "bad_commit_id", _OF_ALERT),
    ("epoch_break", "commit_id", _OF_SERIES),
    ("change_point", "commit_id", _OF_SERIES),
    ("accuracy_result", "commit_id", "''"),
    ("decode_result", "commit_id", "''"),
    ("serving_result", "commit_id", "''"),
    ("accuracy_gate", "commit_id", "''"),
)
_COPIED = "sha, parent_sha, topo_order, dirty, subject, author, committed_at"


def upgrade() -> None:
    with op.batch_alter_table("commit") as table:
        table.drop_constraint("uq_commit_sha_dirty", type_="unique")
        table.create_unique_constraint("uq_commit_sha_dirty_project", ["sha", "dirty", "project"])
    with op.batch_alter_table("release") as table:
        table.drop_constraint("uq_release_name", type_="unique")
        table.create_unique_constraint("uq_release_name_commit_id", ["name", "commit_id"])
    named = """SELECT 1 FROM "commit" WHERE project <> ''"""
    if op.get_bind().exec_driver_sql(f"{named} LIMIT 1").first() is not None:
        for table_name, column, project in _REFERENCES:
            _divide(table_name, column, project.format(table=table_name))


def downgrade() -> None:
    first = '(SELECT MIN(a.id) FROM "commit" a WHERE a.sha = {c}.sha AND a.dirty = {c}.dirty)'
    newest = 'SELECT MAX(id) FROM "release" GROUP BY name'
    op.execute(f'DELETE FROM "release" WHERE id NOT IN ({newest})')
    for table_name, column in (*(row[:2] for row in _REFERENCES), ("release", "commit_id")):
        op.execute(
            f'UPDATE "{table_name}" SET {column} = (SELECT {first.format(c="b")} FROM "commit" b '
            f'WHERE b.id = "{table_name}".{column}) WHERE {column} IS NOT NULL'
        )
    op.execute(f'DELETE FROM "commit" WHERE id <> {first.format(c=chr(34) + "commit" + chr(34))}')
    op.execute(
        'DELETE FROM "release" WHERE id NOT IN (SELECT MAX(id) FROM "release" GROUP BY name)'
    )
    with op.batch_alter_table("commit") as table:
        table.drop_constraint("uq_commit_sha_dirty_project", type_="unique")
        table.create_unique_constraint("uq_commit_sha_dirty", ["sha", "dirty"])
    with op.batch_alter_table("release") as table:
        table.drop_constraint("uq_release_name_commit_id", type_="unique")
        table.create_unique_constraint("uq_release_name", ["name"])


def _divide(table: str, column: str, project: str) -> None:
    """Let each row refer to a commit of its own project; add the rows of commits that need it."""
    op.execute(
        f"""INSERT INTO "commit" ({_COPIED}, project)
        SELECT DISTINCT {", ".join(f"c.{name}" for name in _COPIED.split(", "))}, wanted.project
        FROM (SELECT {column} AS commit_id, {project} AS project FROM "{table}") wanted
        JOIN "commit" c ON c.id = wanted.commit_id
        WHERE wanted.project IS NOT NULL AND NOT EXISTS (
            SELECT 1 FROM "commit" o
            WHERE o.sha = c.sha AND o.dirty = c.dirty AND o.project = wanted.project)"""
    )
    own = f"""SELECT o.id FROM "commit" o JOIN "commit" c ON o.sha = c.sha AND o.dirty = c.dirty
        WHERE c.id = "{table}".{column} AND o.project = {project}"""
    other = f"""SELECT 1 FROM "commit" c
        WHERE c.id = "{table}".{column} AND c.project <> {project}"""
    op.execute(f'UPDATE "{table}" SET {column} = ({own}) WHERE EXISTS ({other})')

"""Published numbers from the package's file into the database, where pages read them."""

from __future__ import annotations

from db.engine import Database
from db.reference_store import ReferenceInfo, store_reference_values
from workloads.published import PublishedValue, published_values


def keep_references(database: Database) -> None:
    """Make the database hold what this version knows to be published. Cheap where it does.

    Raises DatabaseError if it can't be written.
    """
    with database.session() as session:
        store_reference_values(session, map(_info, published_values()))


def _info(value: PublishedValue) -> ReferenceInfo:
    return ReferenceInfo(
        source=value.source,
        source_table=value.table,
        kernel=value.kernel,
        metric=value.metric,
        value=value.value,
        unit=value.unit,
        baseline=value.baseline,
        model=value.model,
        m=value.m,
        suite=value.suite,
        task=value.task,
        bound=value.bound,
        hardware=value.hardware,
        note=value.note,
    )

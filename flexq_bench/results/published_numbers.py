"""Copy of the package's published numbers in the database, from which pages read them."""

from __future__ import annotations

from flexq_bench.db.engine import Database
from flexq_bench.db.reference_store import ReferenceInfo, store_reference_values
from flexq_bench.workloads.published import PublishedValue, published_values


def store_published_numbers(database: Database) -> None:
    """Store the published numbers of this version; fast if they are stored already.

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

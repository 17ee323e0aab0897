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
    values = value.model_dump()
    return ReferenceInfo(source_table=values.pop("table"), unit=value.unit, **values)

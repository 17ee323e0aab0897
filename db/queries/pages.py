"""Keyset paging: a page begins after the last row of the previous one, found by an index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, or_, select
from sqlalchemy.orm import Session

from flexq_bench.db.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a list to return: at most `limit`.

    after: identity of the row before the first (an id, or a uuid); None: from the beginning.
    offset: number of rows to skip; unlike `after`, its cost grows with the number.
    """

    limit: int
    after: Any = None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Order of a list. identity: unique column that a reader names a row by.

    keys: columns without nulls, the last of them unique; descending: which of them.
    """

    identity: Any
    keys: tuple[Any, ...]
    descending: tuple[bool, ...]

    def page(self, session: Session, query: Select[Any], page: Page | None) -> Select[Any]:
        """Return the query of a page in this order; None: of all rows.

        Raises NotFoundError if the row `after` is not stored.
        """
        pairs = zip(self.keys, self.descending, strict=True)
        query = query.order_by(*(key.desc() if desc else key for key, desc in pairs))
        if page is None:
            return query
        if page.after is not None:
            last = session.execute(select(*self.keys).where(self.identity == page.after)).first()
            if last is None:
                raise NotFoundError(f"no row {page.after!r:.60}: begin again with the first page")
            query = query.where(self._is_after(last))
        return query.limit(page.limit).offset(page.offset)

    def _is_after(self, values: Any) -> ColumnElement[bool]:
        after = [
            key < value if desc else key > value
            for key, desc, value in zip(self.keys, self.descending, values, strict=True)
        ]
        equal = [key == value for key, value in zip(self.keys, values, strict=True)]
        alternatives = or_(*(and_(*equal[:i], after[i]) for i in range(len(after))))
        # The first condition follows from the others; databases use it to search an index.
        return and_(or_(after[0], equal[0]), alternatives) if len(after) > 1 else alternatives


def count_of(session: Session, query: Select[Any]) -> int:
    """Return the number of rows of a query."""
    counted = query.order_by(None).limit(None).offset(None).subquery()
    return session.scalars(select(func.count()).select_from(counted)).one()

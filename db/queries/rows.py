"""Rows of a query as frozen dataclasses: each field is a column."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Label
from sqlalchemy.orm import Session

T = TypeVar("T")


def columns_of(row: Any, *tables: Any, **others: Any) -> list[Label[Any]]:
    """Return a column for each field of a dataclass, in the order of its fields.

    tables: the first with a column of the field's name has it. others: the columns of the other
    fields, by the field's name. Fields that no table has are left out.
    """
    columns: list[Label[Any]] = []
    for field in fields(row):
        column: ColumnElement[Any] | None = others.get(field.name)
        for table in tables:
            if column is None:
                column = table.__table__.columns.get(field.name)
        if column is not None:
            columns.append(column.label(field.name))
    return columns


def rows_of(session: Session, row: type[T], query: Any) -> list[T]:
    """Return the result of a query that selects `columns_of(row, ...)`."""
    return [row(*values) for values in session.execute(query)]

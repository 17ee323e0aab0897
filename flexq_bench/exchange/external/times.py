"""Parsing of times in files of other tools."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(text: object) -> str | None:
    """Convert an ISO 8601 time to UTC; None: it is no such time. A time without a zone is UTC."""
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    in_zone = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    try:
        return in_zone.astimezone(UTC).isoformat()
    except OverflowError:
        return None

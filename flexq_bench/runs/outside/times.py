"""Times as other tools write them."""

from __future__ import annotations

from datetime import UTC, datetime


def iso_time(text: object) -> str | None:
    """ISO 8601 in UTC of a time in that form; None: it is none. Without a zone it is UTC."""
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

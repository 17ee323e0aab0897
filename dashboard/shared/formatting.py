"""Stored text, times and numbers as what Streamlit may show."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from db.queries import AlertRow

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&^=])")
_SHORT_SHA = 10


def as_text(text: str) -> str:
    """Markdown that shows the text as it is on one line: nothing in it formats, links or runs."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def as_code(text: str) -> str:
    """Markdown that shows the text as code on one line, whatever backticks it has."""
    line = " ".join(text.split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence = "`" * (longest + 1)
    # A backtick at an end would join the fence; Markdown takes one space off each end again.
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def short_commit(sha: str, dirty: bool) -> str:
    """`b4d8aaa012`, with a + where the tree had changes; what a wheel calls itself stays whole."""
    return (sha if sha.startswith("pkg-") else sha[:_SHORT_SHA]) + ("+" if dirty else "")


def as_change(log_ratio: float | None) -> str:
    """`+5.13 %` of ln(head / base); a dash for None."""
    return "–" if log_ratio is None else f"{100 * math.expm1(log_ratio):+.2f} %"


def alert_title(alert: AlertRow) -> str:
    """`Alert 3: flexq-w6a6 +5.21 %, the worst of 50 verdicts`; of several kernels the worst one is
    named."""
    named = alert.kernels[0] if alert.kernels else alert.family
    others = len(alert.kernels) - 1
    if others > 0:
        named += f" and {others} more of {alert.family}"
    if alert.worst is None:
        return f"Alert {alert.id}: {named}, wrong results"
    change = as_change(alert.worst)
    return f"Alert {alert.id}: {named} {change}" + (
        f", the worst of {alert.decisions} verdicts" if alert.decisions > 1 else ""
    )


def zone_named(name: str | None) -> tzinfo:
    """The time zone that a browser named; UTC where it named none, or one unknown here."""
    try:
        return ZoneInfo(name) if name else UTC
    except (ZoneInfoNotFoundError, ValueError):
        return UTC


def local_time(moment: datetime, zone: tzinfo) -> str:
    """`2025-11-21 11:00 CET`."""
    return moment.astimezone(zone).strftime("%Y-%m-%d %H:%M %Z")

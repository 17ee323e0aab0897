"""Stored text, times and numbers as what Streamlit may show."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from db.queries import AlertRow
from flexq_bench.stats import Interval

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&^=])")
_SHORT_SHA = 10
_THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "power limit (software)",
    0x8: "slow-down (hardware)",
    0x10: "sync boost",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake (hardware)",
    0x100: "display clocks",
}


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


def as_interval(ratio: Interval | None) -> str:
    """`-1.20 % to +0.40 %` of a ratio and 1; empty for None."""
    if ratio is None:
        return ""
    return f"{100 * (ratio.low - 1):+.2f} % to {100 * (ratio.high - 1):+.2f} %"


def stage_in_words(stage: str) -> str:
    """Describe what a stage times: `gemm` only the GEMM, `linear` activation quantization too."""
    return {
        "gemm": "GEMM only",
        "linear": "including activation quantization",
    }.get(stage, stage)


def throttle_in_words(mask: float | None) -> str:
    """Describe why the clock is throttled; empty for None.

    mask: NVML's (nvml.h, nvmlClocksEventReasons).
    """
    if mask is None or mask != mask:
        return ""
    bits = int(mask)
    reasons = [words for bit, words in _THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(_THROTTLE_REASONS)
    return (
        ", ".join([*reasons, *([f"another reason (0x{unknown:x})"] if unknown else [])]) or "none"
    )


def as_age(age: timedelta) -> str:
    """`40 s`, `12 min`, `3 h`, `9 d`."""
    seconds = max(age.total_seconds(), 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


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

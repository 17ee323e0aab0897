"""Formatting of stored text, times and numbers for Streamlit."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from flexq_bench.db.queries import AlertRow
from flexq_bench.stats import Interval
from flexq_bench.verdicts.texts import alert_text

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()<>#+\-.!|~$:&^=])")
_SHORT_SHA_LENGTH = 10
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
    """Escape text for Markdown, on one line: nothing in it is formatted or linked."""
    return _MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def as_code(text: str) -> str:
    """Return Markdown that shows text as code on one line, also if it has backticks."""
    line = " ".join(text.split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    fence = "`" * (longest + 1)
    # A backtick at an end would extend the fence; Markdown strips one space at each end.
    padding = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{padding}{line}{padding}{fence}"


def short_commit(sha: str, dirty: bool) -> str:
    """Shorten a sha to `b4d8aaa012`, with + for a dirty tree; `pkg-` names are not shortened."""
    return (sha if sha.startswith("pkg-") else sha[:_SHORT_SHA_LENGTH]) + ("+" if dirty else "")


def as_change(log_ratio: float | None) -> str:
    """Format ln(head / base) as `+5.13 %`; None: a dash."""
    return "–" if log_ratio is None else f"{100 * math.expm1(log_ratio):+.2f} %"


def percent_change(ratio: Interval | None) -> float | None:
    """Return the difference of a ratio from 1, in percent."""
    return None if ratio is None else 100 * (ratio.estimate - 1)


def as_interval(ratio: Interval | None) -> str:
    """Format the interval of a ratio as `-1.20 % to +0.40 %`, relative to 1; None: empty."""
    if ratio is None:
        return ""
    return f"{100 * (ratio.low - 1):+.2f} % to {100 * (ratio.high - 1):+.2f} %"


def stage_in_words(stage: str) -> str:
    """Describe a stage: `gemm` is the GEMM only, `linear` includes activation quantization."""
    return {
        "gemm": "GEMM only",
        "linear": "including activation quantization",
        "op": "the whole operation",
    }.get(stage, stage)


def throttle_in_words(mask: float | None) -> str:
    """Describe the throttle reasons; empty for None.

    mask: bit mask of NVML (nvml.h, nvmlClocksEventReasons).
    """
    if mask is None or mask != mask:
        return ""
    bits = int(mask)
    reasons = [words for bit, words in _THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(_THROTTLE_REASONS)
    return (
        ", ".join([*reasons, *([f"another reason (0x{unknown:x})"] if unknown else [])]) or "none"
    )


def in_gib(size: float | None) -> float | None:
    """Convert bytes to GiB."""
    return None if size is None else size / 2**30


def as_age(age: timedelta) -> str:
    """Format an age as `40 s`, `12 min`, `3 h` or `9 d`."""
    seconds = max(age.total_seconds(), 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def alert_title(alert: AlertRow) -> str:
    """Return `Alert 3: flexq-w6a6 +5.21 %, the worst of 50 verdicts`; names the worst kernel."""
    subject = alert.kernels[0] if alert.kernels else alert.family
    more = len(alert.kernels) - 1
    if more > 0:
        subject += f" and {more} more of {alert.family}"
    change = alert_text(alert)
    if change is None:
        return f"Alert {alert.id}: {subject}, wrong results"
    return f"Alert {alert.id}: {subject} {change}" + (
        f", the worst of {alert.decisions} verdicts" if alert.decisions > 1 else ""
    )


def time_zone(name: str | None) -> tzinfo:
    """Return the time zone reported by a browser; UTC if it is missing or unknown."""
    try:
        return ZoneInfo(name) if name else UTC
    except (ZoneInfoNotFoundError, ValueError):
        return UTC


def local_time(moment: datetime, zone: tzinfo) -> str:
    """Format a time as `2025-11-21 11:00 CET`."""
    return moment.astimezone(zone).strftime("%Y-%m-%d %H:%M %Z")

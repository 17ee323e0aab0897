"""Units and scales of metrics: the one place that defines how values of a metric are compared."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from flexq_bench.db.records import TIME_METRICS

RATIO = "ratio"  # times and rates: above 0, a change is a factor
COUNT = "count"  # bytes, registers, errors: 0 is allowed, a change is a difference
DIFFERENCE = "difference"  # signed values, for example losses of accuracy: as counts, any size

_PREFIXES = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "m": 1e-3, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "n": 1e-9, "p": 1e-12,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
    "kilo": 1e3, "mega": 1e6, "giga": 1e9, "tera": 1e12, "milli": 1e-3, "micro": 1e-6,
    "nano": 1e-9, "pico": 1e-12,
}  # fmt: skip
_TIME, _BYTES, _SHARE = "s", "byte", "share"
_BASES = {  # unit without its prefix -> dimension and factor
    "s": (_TIME, 1.0), "B": (_BYTES, 1.0), "byte": (_BYTES, 1.0), "bytes": (_BYTES, 1.0),
    "FLOPS": ("FLOP/s", 1.0), "FLOP": ("FLOP", 1.0), "OPS": ("OP/s", 1.0), "OP": ("OP", 1.0),
    "Hz": ("1/s", 1.0), "J": ("J", 1.0), "W": ("W", 1.0), "bit": (_BYTES, 1 / 8),
    "ops": ("OP/s", 1.0), "bps": (f"{_BYTES}/s", 1 / 8),
    "sec": (_TIME, 1.0), "secs": (_TIME, 1.0), "second": (_TIME, 1.0), "seconds": (_TIME, 1.0),
    "tokens": ("tokens", 1.0), "items": ("items", 1.0), "requests": ("requests", 1.0),
}  # fmt: skip
_WHOLE = {  # without prefixes
    **dict.fromkeys(("min", "mins", "minute", "minutes"), (_TIME, 60.0)),
    **dict.fromkeys(("h", "hr", "hour", "hours"), (_TIME, 3600.0)),
    **dict.fromkeys(("qps", "rps", "tps", "fps", "iops"), ("1/s", 1.0)),
    "%": (_SHARE, 0.01), "percent": (_SHARE, 0.01), "fraction": (_SHARE, 1.0),
}  # fmt: skip
_RATES = re.compile(r"\s*(?:/|_per_| per )\s*")
# One execution: what is given for it, as ns/op and allocs/op, is compared as the thing itself.
_EXECUTIONS = {"op", "iter", "iteration", "call", "launch", "invocation", "run"}
_COUNTED = {
    "count", "counts", "errors", "registers", "spills", "warps", "threads", "blocks",
    "instructions", "launches", "kernels", "allocations", "allocs", "events", "lines", "files",
    "failures", "questions",
}  # fmt: skip
# An import may say the scale of a metric behind its unit: `points [count]`.
_WITH_SCALE = re.compile(rf"(.*\S)\s*\[({RATIO}|{COUNT}|{DIFFERENCE})\]\s*")


@dataclass(frozen=True, slots=True)
class _Unit:
    dimension: str  # equal for units that can be converted
    factor: float


def scale_of(metric: str, unit: str) -> str:
    """Return how values of a metric are compared: RATIO, COUNT or DIFFERENCE.

    As stated behind the unit, else by the unit: times, rates, powers and energies are ratios; bytes
    and things that are counted, counts; shares and unknown units, differences.
    """
    if metric in TIME_METRICS.values():
        return RATIO
    unit, stated = unit_and_scale(unit)
    if stated:
        return stated
    unit = without_execution(unit)
    known = _parsed(unit)
    if (known is not None and known.dimension == _BYTES) or unit.lower() in _COUNTED:
        return COUNT
    if known is None:
        return RATIO if _RATES.search(unit.strip()) else DIFFERENCE
    return DIFFERENCE if known.dimension == _SHARE else RATIO


def unit_and_scale(unit: str) -> tuple[str, str]:
    """Return a unit without the scale that is stated behind it, and the scale; empty: none is."""
    found = _WITH_SCALE.fullmatch(unit)
    return (found[1], found[2]) if found else (unit, "")


def with_scale(unit: str, scale: str) -> str:
    """Return a unit that states a scale, unless it has that anyway. Raises ValueError."""
    if scale not in (RATIO, COUNT, DIFFERENCE):
        raise ValueError(f"the scale is {RATIO}, {COUNT} or {DIFFERENCE}, not {scale!r}")
    plain = unit_and_scale(unit)[0]
    return plain if scale_of("", plain) == scale else f"{plain} [{scale}]"


def without_execution(unit: str) -> str:
    """Return ns for ns/op, and allocs for allocs/op; other units as they are."""
    thing, *below = _RATES.split(unit.strip(), maxsplit=1)
    return thing if below and below[0] in _EXECUTIONS else unit.strip()


def is_rate(unit: str) -> bool:
    """Return True for a quantity per time, more of which is better: GB/s, tokens/s, TFLOPS."""
    unit = unit_and_scale(unit)[0]
    known = _parsed(unit)
    above, *below = _RATES.split(unit.strip(), maxsplit=1)
    per = _simple("s" if below and below[0] in ("second", "sec") else below[0]) if below else None
    if per is not None and per.dimension == _TIME:
        return not (known is not None and known.dimension == f"{_TIME}/s")
    return (
        known is not None
        and known.dimension.endswith(("P/s", "1/s", "byte/s"))
        and above == unit.strip()
    )


@lru_cache(maxsize=1024)
def conversion(unit: str, to: str) -> float | None:
    """Return the factor from one unit to another; None: not of one quantity, or scale."""
    if unit == to:
        return 1.0
    if scale_of("", unit) != scale_of("", to):
        return None
    one, other = _parsed(unit), _parsed(to)
    if one is None or other is None or one.dimension != other.dimension:
        return None
    return float(f"{one.factor / other.factor:.15g}")  # ms to us is 1000, not 1000.0000000000001


def _parsed(text: str) -> _Unit | None:
    text = unit_and_scale(text)[0]
    above, *below = _RATES.split(text.strip(), maxsplit=1)
    known = _simple(above)
    if known is None or not below:
        return known
    per = _simple("s" if below[0] in ("second", "sec") else below[0])
    if per is not None and per.dimension == _TIME:
        return _Unit(f"{known.dimension}/s", known.factor / per.factor)
    return _Unit(f"{known.dimension}/{below[0]}", known.factor)


def _simple(text: str) -> _Unit | None:
    for spelled in dict.fromkeys((text, text.lower() if len(text) > 2 else text)):  # Seconds
        if spelled in _WHOLE:
            return _Unit(*_WHOLE[spelled])
        for base, (dimension, factor) in _BASES.items():
            prefix = _PREFIXES.get(spelled.removesuffix(base)) if spelled.endswith(base) else None
            if prefix is not None:
                return _Unit(dimension, prefix * factor)
    return None

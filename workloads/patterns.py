"""Glob patterns for kernel labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import lru_cache

from flexq_bench.workloads.case import parse_kernel_label
from flexq_bench.workloads.errors import WorkloadError

_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}")  # abq-w{2..8}a8
_WILDCARD = re.compile(r"(\*|\{\d{1,4}\.\.\d{1,4}\})")


def is_glob(pattern: str) -> bool:
    """Return True if the pattern has a `*` or a range, so that it may match several labels."""
    return _WILDCARD.search(pattern) is not None


def check_pattern(pattern: str) -> str:
    """Return the pattern. Raises WorkloadError if no label can match it."""
    for low, high in _RANGE.findall(pattern):
        if int(low) > int(high):
            raise WorkloadError(f"a range goes from low to high, got {pattern!r}")
    try:
        parse_kernel_label(_WILDCARD.sub("x", pattern))
    except WorkloadError:
        raise WorkloadError(
            "a kernel is written name or name[variant], with * for any part and {2..8} for any of "
            f"these numbers, got {pattern!r}"
        ) from None
    return pattern


def check_patterns(patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the patterns. Raises WorkloadError for the first one that no label can match."""
    return tuple(map(check_pattern, patterns))


def matches(pattern: str, label: str) -> bool:
    """Return True if a label equals the pattern or matches it.

    `*` matches any characters except brackets, `{2..8}` one of these numbers. So `flexq-*` matches
    kernels without a variant, and `flexq-*[*]` those with one: selecting a family does not select
    its ablations.
    """
    if pattern == label:
        return True
    return _compiled(pattern).fullmatch(label) is not None


def matches_any(patterns: Iterable[str], label: str) -> bool:
    """Return True if a label matches one of the patterns."""
    return any(matches(pattern, label) for pattern in patterns)


def matches_any_gpu(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Return True if one of the names (SKUs) matches a glob in any case, for example `*h200*`."""
    expressions = [re.compile(translate(pattern), re.IGNORECASE) for pattern in patterns]
    return any(expression.match(name) for name in names for expression in expressions)


@lru_cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(map(_expression, _WILDCARD.split(pattern))))


def _expression(part: str) -> str:
    """Convert a part of a pattern, a wildcard or literal text, to a regular expression."""
    if part == "*":
        return r"[^\[\]]*"
    numbers = _RANGE.fullmatch(part)
    if numbers is None:
        return re.escape(part)
    return f"({'|'.join(str(i) for i in range(int(numbers[1]), int(numbers[2]) + 1))})"


def select(patterns: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """Return the labels that match any pattern, in the order of `labels`.

    A pattern that equals a label matches only this label: the star in a kernel's name (`abq-w2*a8`)
    is then no wildcard.
    """
    selected = {
        label
        for pattern in patterns
        for label in ((pattern,) if pattern in labels else labels)
        if matches(pattern, label)
    }
    return tuple(label for label in labels if label in selected)

"""Kernel labels and the globs that choose among them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from workloads.case import parse_kernel_label
from workloads.errors import WorkloadError

_RANGE = re.compile(r"\{(\d{1,4})\.\.(\d{1,4})\}")  # abq-w{2..8}a8
_WILDCARD = re.compile(r"(\*|\{\d{1,4}\.\.\d{1,4}\})")


def is_glob(pattern: str) -> bool:
    """Return True if the pattern has a `*` or a range, so that it may match several labels."""
    return _WILDCARD.search(pattern) is not None


def check_pattern(pattern: str) -> str:
    """The pattern itself, if a label could match it. Raises WorkloadError if none could."""
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
    """The patterns, each checked by check_pattern. Raises WorkloadError for the first bad one."""
    return tuple(map(check_pattern, patterns))


def matches(pattern: str, label: str) -> bool:
    """Return True if a label equals the pattern or matches it.

    `*` is any characters but brackets, `{2..8}` one of these numbers.

    So `flexq-*` matches kernels without a variant, and `flexq-*[*]` those with one: selecting a
    family does not select every ablation.
    """
    if pattern == label:
        return True
    return re.fullmatch("".join(map(_expression, _WILDCARD.split(pattern))), label) is not None


def _expression(part: str) -> str:
    """A part of a pattern, a wildcard or what lies between two, as a regular expression."""
    if part == "*":
        return r"[^\[\]]*"
    numbers = _RANGE.fullmatch(part)
    if numbers is None:
        return re.escape(part)
    return f"({'|'.join(str(i) for i in range(int(numbers[1]), int(numbers[2]) + 1))})"


def select(patterns: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """The labels that some pattern finds, in the order of `labels`.

    A pattern that is itself one of the labels finds only that one: a kernel whose name has a star
    in it (`abq-w2*a8`) does not bring others with it.
    """
    selected = {
        label
        for pattern in patterns
        for label in ((pattern,) if pattern in labels else labels)
        if matches(pattern, label)
    }
    return tuple(label for label in labels if label in selected)

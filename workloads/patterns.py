"""Kernel labels and the globs that choose among them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from workloads.case import parse_kernel_label
from workloads.errors import WorkloadError


def is_glob(pattern: str) -> bool:
    return "*" in pattern


def check_pattern(pattern: str) -> str:
    """The pattern itself, if a label could match it. Raises WorkloadError if none could."""
    try:
        parse_kernel_label(pattern.replace("*", "x"))
    except WorkloadError:
        raise WorkloadError(
            f"a kernel is written name or name[variant], with * for any part, got {pattern!r}"
        ) from None
    return pattern


def matches(pattern: str, label: str) -> bool:
    """Whether a label is the pattern, or fits it with `*` for any characters but brackets.

    So `flexq-*` finds kernels without a variant, and `flexq-*[*]` those with one: nobody measures
    every ablation by asking for a family.
    """
    if pattern == label:
        return True
    parts = (re.escape(part) for part in pattern.split("*"))
    return re.fullmatch(r"[^\[\]]*".join(parts), label) is not None


def select(patterns: Sequence[str], labels: Sequence[str]) -> tuple[str, ...]:
    """The labels that some pattern finds, in the order of `labels`.

    A pattern that is itself one of the labels finds only that one: a kernel whose name has a star
    in it (`abq-w2*a8`) does not bring others with it.
    """
    found = {
        label
        for pattern in patterns
        for label in ((pattern,) if pattern in labels else labels)
        if matches(pattern, label)
    }
    return tuple(label for label in labels if label in found)

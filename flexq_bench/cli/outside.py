"""Kernels from outside at the command line: `--kernels-from`, and what became of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode

if TYPE_CHECKING:
    from flexq_bench.measure.outside_kernels import Adopted
    from workloads.suite import Suite

_KEEPER = "flexq_bench.measure.outside_kernels"


def use_kernels_from(texts: Sequence[str] | None, *, only: bool = False) -> None:
    """Know the kernels of these files and modules, and of no others.

    One that can't be had is a line on stderr, and the verb goes on with the others. Raises
    SourceError if there is no such file or package, whatever else there is to do; UsageError if
    no source can be had and `only` says that the verb is about nothing else.
    """
    if not texts:
        if _KEEPER in sys.modules:  # else there is nothing to forget, and torch to wait for
            from flexq_bench.measure import outside_kernels

            outside_kernels.forget()
        return
    from flexq_bench.measure import outside_kernels
    from kernels.outside.sources import KernelSource

    outside_kernels.forget()
    sources = [KernelSource.parse(text) for text in texts]
    for source in sources:
        source.check_there()
    found = outside_kernels.adopt(sources)
    if only and not found.labels:
        raise UsageError(next(iter(found.failures.values())))
    outside_kernels.log_failures()


def adopted() -> Adopted:
    """Return the sources of `--kernels-from` that were loaded or failed."""
    from flexq_bench.measure import outside_kernels

    return outside_kernels.adopted()


def sweep_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the kernels of a sweep: those that were named, else those of `--kernels-from`.

    None: neither was given. Raises UsageError if all that was named failed to load.
    """
    left = known_patterns(patterns)
    if left is None and _KEEPER in sys.modules:
        left = adopted().all_labels or None
    if left == ():
        raise UsageError("nothing to measure: --kernels names no source that could be had")
    return left


def known_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Labels and globs of kernels but for those of sources that failed; None: none was given."""
    if patterns is None or _KEEPER not in sys.modules:
        return None if patterns is None else tuple(patterns)
    from flexq_bench.measure import outside_kernels

    return outside_kernels.without_failed(patterns, adopted())


def with_outside(suite: Suite, patterns: Sequence[str] | None) -> Suite:
    """The suite with the kernels of `--kernels-from`, and those of packages that patterns name."""
    from kernels.registry import outside_labels
    from workloads.patterns import select

    named = select(tuple(patterns or ()), outside_labels())
    return suite.adding(tuple(dict.fromkeys((*adopted().all_labels, *named))))


def code_with_failures(code: int) -> int:
    """The exit code where sources could not be had: their results are missing."""
    from flexq_bench.runs.lifecycle import worst

    if _KEEPER in sys.modules and adopted().failures:
        return worst((code, ExitCode.MISSING))
    return code

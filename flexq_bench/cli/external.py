"""Kernels from outside on the command line: `--kernels-from`, and failures to load them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode

if TYPE_CHECKING:
    from flexq_bench.measure.external_kernels import Adopted
    from flexq_bench.workloads.suite import Suite

_STATE_MODULE = "flexq_bench.measure.external_kernels"


def use_kernels_from(texts: Sequence[str] | None, *, only: bool = False) -> None:
    """Register the kernels of these files and modules, and of no others.

    A source that can't be loaded is reported on stderr. Raises SourceError if a file or package
    doesn't exist; UsageError if no source can be loaded and `only`, which is for verbs that need
    one, is set.
    """
    if not texts:
        # Otherwise there is no state, and importing the module would import torch.
        if _STATE_MODULE in sys.modules:
            from flexq_bench.measure import external_kernels

            external_kernels.forget()
        return
    from flexq_bench.kernels.external.sources import KernelSource
    from flexq_bench.measure import external_kernels

    external_kernels.forget()
    sources = [KernelSource.parse(text) for text in texts]
    for source in sources:
        source.check_exists()
    sources_adopted = external_kernels.adopt(sources)
    if only and not sources_adopted.labels:
        raise UsageError(next(iter(sources_adopted.failures.values())))
    external_kernels.log_failures()


def adopted() -> Adopted:
    """The sources of `--kernels-from`, loaded and failed."""
    from flexq_bench.measure import external_kernels

    return external_kernels.adopted()


def sweep_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the kernels of a sweep: those given, else those of `--kernels-from`; None: neither.

    Raises UsageError if all given kernels are of sources that failed to load.
    """
    loaded = known_patterns(patterns)
    if loaded is None and _STATE_MODULE in sys.modules:
        loaded = adopted().all_labels or None
    if loaded == ():
        raise UsageError("nothing to measure: no source in --kernels could be loaded")
    return loaded


def known_patterns(patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return labels and globs, without those of sources that failed to load; None: not given."""
    if patterns is None or _STATE_MODULE not in sys.modules:
        return None if patterns is None else tuple(patterns)
    from flexq_bench.measure import external_kernels

    return external_kernels.without_failed(patterns, adopted())


def with_external(suite: Suite, patterns: Sequence[str] | None) -> Suite:
    """Add the kernels of `--kernels-from`, and installed packages' that match patterns."""
    from flexq_bench.kernels.registry import external_labels
    from flexq_bench.workloads.patterns import select

    matching = select(tuple(patterns or ()), external_labels())
    return suite.adding(tuple(dict.fromkeys((*adopted().all_labels, *matching))))


def code_with_failures(code: int) -> int:
    """The exit code, at least MISSING if sources failed to load."""
    from flexq_bench.exit_codes import worst_exit_code

    return worst_exit_code((code, ExitCode.MISSING)) if failures_to_load() else code


def failures_to_load() -> list[str]:
    """Reasons of the sources of kernels that failed to load, a line each."""
    return list(adopted().failures.values()) if _STATE_MODULE in sys.modules else []

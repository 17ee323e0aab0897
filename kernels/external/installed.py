"""Discovery of kernels in installed packages: by import, unless find_by sets another finder.

This module imports nothing heavy: a process calls find_by before it needs any kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexq_bench.kernels.contract import ExternalKernel


def _imported() -> Iterable[ExternalKernel]:
    from flexq_bench.kernels.external.loading import load_installed

    return load_installed()


_find: Callable[[], Iterable[ExternalKernel]] = _imported


def find_by(finder: Callable[[], Iterable[ExternalKernel]]) -> None:
    """Set the finder of the registry, if the registry has not searched yet."""
    global _find
    _find = finder


def kernels() -> Iterable[ExternalKernel]:
    """Return the kernels of installed packages."""
    return _find()

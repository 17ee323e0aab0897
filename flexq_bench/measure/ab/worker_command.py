"""The command line of an A/B worker, by the layout of the tree whose code it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from flexq_bench.measure.worker_process import WorkerError

# Newest layout first. A tree has at most one of them; older trees have no comparisons.
WORKER_MODULES = ("flexq_bench.measure.ab.worker", "flexq_bench.interleave.worker")


def file_of(module: str) -> str:
    """Path of a module in its tree."""
    return module.replace(".", "/") + ".py"


def worker_module(has_file: Callable[[str], bool]) -> str | None:
    """The module of the A/B worker in a tree; None: the tree has none.

    has_file: returns True if the tree has a file, by its path within the tree.
    """
    return next((module for module in WORKER_MODULES if has_file(file_of(module))), None)


def worker_command(tree: Path) -> tuple[str, ...]:
    """Command that starts the A/B worker of a tree, without its options.

    Raises WorkerError if the tree has no worker.
    """
    module = worker_module(lambda path: (tree / path).is_file())
    if module is None:
        raise WorkerError(f"{tree} has no A/B worker: compare commits that have one")
    return (sys.executable, "-m", module)

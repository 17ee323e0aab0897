"""Parallel computation of a simulation's rows, each with its own random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def in_processes(
    row: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], processes: int
) -> Iterator[Any]:
    """Return row(*arguments) of each, in order. processes 1: computed in this process."""
    todo = list(arguments)
    if processes == 1:
        yield from (row(*task) for task in todo)
        return
    with ProcessPoolExecutor(processes) as pool:
        futures = [pool.submit(row, *task) for task in todo]
        yield from (future.result() for future in futures)

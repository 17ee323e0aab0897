"""Two ranks on a CPU as threads of this process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.measure.rank_worker import RankOperations


class ThreadRanks(Ranks):
    """One of the threads. shared: what each passes to the others; add: the sum of all."""

    def __init__(self, rank: int, barrier: threading.Barrier, shared: list[Any]) -> None:
        self.rank, self.count = rank, len(shared)
        self._barrier, self._shared = barrier, shared

    def _of_all(self, mine: Any) -> list[Any]:
        self._shared[self.rank] = mine
        self._barrier.wait(30)
        every = list(self._shared)
        self._barrier.wait(30)
        return every

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._of_all(x.clone())).sum(dim=0))

    add_by_library = add

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._of_all(x.clone()), dim=1)

    def any(self, condition: bool) -> bool:
        return any(self._of_all(condition))

    def exchange(self, sent: torch.Tensor) -> None:
        self._of_all(sent)[self.rank - 1].clone()


class RankThreads:
    """Counterpart of RankProcesses."""

    is_broken = False

    def __init__(self, count: int = 2) -> None:
        barrier, shared = threading.Barrier(count), [None] * count
        self._threads = ThreadPoolExecutor(count)
        self._ranks: list[RankOperations] = []
        for rank in range(count):
            ranks: Any = ThreadRanks(rank, barrier, shared)
            self._ranks.append(RankOperations(torch.device("cpu"), ranks))

    def ask(self, what: str, **arguments: Any) -> list[dict[str, Any]]:
        asked = [self._threads.submit(getattr(r, what), **arguments) for r in self._ranks]
        return [answer.result(30) for answer in asked]

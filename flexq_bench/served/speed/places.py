"""The places of two compared engines: both at once, or in turns if they share one GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from flexq_bench.served.engines import READY_S, EngineSpec, RunningEngine, started

Side = Literal["base", "head"]
SIDES: tuple[Side, Side] = ("base", "head")
_PLACEMENTS_A_START = 3  # of engines that run at once; then both start again and change places


class Places:
    """Two engines, started when they are needed and ended with the context.

    gpus: indices; with one, engines that are started here take turns, and start anew for each
    placement. With two they run at once, and change places after every third placement. Without
    any, or if one engine runs already, both run at once. warm: called with each engine that was
    started, or that ran, before its first use. folders: working directories.
    """

    def __init__(
        self,
        engines: Mapping[Side, EngineSpec],
        gpus: Sequence[str],
        *,
        warm: Callable[[Side, RunningEngine], None],
        model: str | None = None,
        ready_within_s: float = READY_S,
        folders: Mapping[Side, Path] | None = None,
    ) -> None:
        self._engines, self._gpus, self._warm = engines, tuple(gpus), warm
        self._model, self._ready_within_s = model, ready_within_s
        self._folders = folders or {}
        self._running: dict[Side, tuple[int, RunningEngine, ExitStack]] = {}

    @property
    def takes_turns(self) -> bool:
        started_here = all(spec.is_started_here for spec in self._engines.values())
        return started_here and len(self._gpus) == 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as stack:  # all of them, even if one does not end well
            for _, _, own in self._running.values():
                stack.push(own)
            self._running.clear()

    def engine(self, side: Side, placement: int) -> RunningEngine:
        """Return the engine of a side, started for this placement if it has to. Raises EngineError.

        An engine in turns is started once in each placement, and ends the other one.
        """
        generation = placement if self.takes_turns else placement // _PLACEMENTS_A_START
        running = self._running.get(side)
        spec = self._engines[side]
        if running is not None and (running[0] == generation or not spec.is_started_here):
            return running[1]
        # Both change places together: the other one may be where this one goes.
        for other in SIDES:
            if other in self._running and (self.takes_turns or self._is_old(other, generation)):
                self._running.pop(other)[2].close()
        gpu = self._gpu(side, generation)
        with ExitStack() as stack:
            engine = stack.enter_context(
                started(
                    spec,
                    gpu=gpu,
                    model=self._model,
                    ready_within_s=self._ready_within_s,
                    folder=self._folders.get(side),
                )
            )
            self._warm(side, engine)
            self._running[side] = (generation, engine, stack.pop_all())
        return engine

    def _is_old(self, side: Side, generation: int) -> bool:
        is_old = self._running[side][0] != generation
        return is_old and self._engines[side].is_started_here

    def _gpu(self, side: Side, generation: int) -> str | None:
        if not self._gpus:
            return None
        if len(self._gpus) == 1:
            return self._gpus[0]
        # Base, head, head, base: as blocks in time, so that a drift of a GPU cancels.
        swapped = generation % 4 in (1, 2)
        return self._gpus[(side == "head") != swapped]

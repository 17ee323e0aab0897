"""Reading prompts into a cache, whole or in pieces: a CUDA graph a shape, where it was prepared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.decode.decoder import Decoder, Pieces
from flexq_bench.decode.layers import ChooseConfig, Workspace
from kernels.decoder import KvLayer
from kernels.runtime.graph_capture import captured

_Shape = tuple[int, int, int]  # rows, tokens of each, longest


@dataclass(frozen=True, slots=True)
class _Captured:
    """pieces: what the graph reads; first: what it leaves, int64 [B]."""

    graph: torch.cuda.CUDAGraph
    pieces: Pieces
    first: torch.Tensor


class PromptReader:
    """The token that follows each piece of a prompt, whose keys and values fill the caches."""

    def __init__(self, decoder: Decoder, caches: list[KvLayer], choose: ChooseConfig) -> None:
        self._decoder, self._caches, self._choose = decoder, caches, choose
        self._device = decoder.model.device
        self._captured: dict[_Shape, _Captured] = {}
        self._workspaces: dict[int, Workspace] = {}
        # They run one after the other and leave nothing in it: one pool serves all graphs.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def read(self, pieces: Pieces) -> torch.Tensor:
        """The greedy token after each piece, int64 [B], valid until the next call."""
        rows, tokens = pieces.tokens.shape
        shape = self._captured.get((rows, tokens, pieces.longest))
        if shape is None:
            # Prompts may have any length: what they take is given back.
            work = Workspace(rows * tokens, self._device, self._choose)
            last = Workspace(rows, self._device, self._choose)
            return self._decoder.prefill(work, last, pieces, self._caches).argmax(dim=1)
        shape.pieces.tokens.copy_(pieces.tokens)
        shape.pieces.starts.copy_(pieces.starts)
        shape.pieces.counts.copy_(pieces.counts)
        shape.pieces.slots.copy_(pieces.slots)
        shape.graph.replay()
        return shape.first

    def prepare(self, rows: int, tokens: int, longest: int) -> None:
        """Capture the reading of a shape, where there are graphs.

        Slot 0 is written to meanwhile: call it before sequences are admitted.
        """
        if self._device.type != "cuda" or (rows, tokens, longest) in self._captured:
            return
        pieces = self._empty(rows, tokens, longest)
        first = torch.zeros(rows, dtype=torch.int64, device=self._device)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(pieces, first)  # compiles and allocates, which can't be captured
        stream.synchronize()
        with captured(stream, pool=self._pool) as graph:
            self._run(pieces, first)
        torch.cuda.current_stream().wait_stream(stream)
        self._captured[rows, tokens, longest] = _Captured(graph, pieces, first)

    def close(self) -> None:
        """Let go of graphs and buffers."""
        for one in self._captured.values():
            one.graph.reset()
        self._captured.clear()
        self._workspaces.clear()

    def _run(self, pieces: Pieces, first: torch.Tensor) -> None:
        rows, tokens = pieces.tokens.shape
        work, last = self._workspace(rows * tokens), self._workspace(rows)
        first.copy_(self._decoder.prefill(work, last, pieces, self._caches).argmax(dim=1))

    def _workspace(self, m: int) -> Workspace:
        if m not in self._workspaces:
            self._workspaces[m] = Workspace(m, self._device, self._choose)
        return self._workspaces[m]

    def _empty(self, rows: int, tokens: int, longest: int) -> Pieces:
        def whole(value: int) -> torch.Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=self._device)

        ids = torch.zeros(rows, tokens, dtype=torch.int32, device=self._device)
        return Pieces(ids, whole(0), whole(1), whole(0), longest)

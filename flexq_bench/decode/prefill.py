"""Prefill of prompts, as a whole or in chunks, with a CUDA graph per prepared shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexq_bench.decode.decoder import Chunks, Decoder
from flexq_bench.decode.layers import ChooseConfig, Workspace, Workspaces
from flexq_bench.kernels.decoder import KvLayer
from flexq_bench.kernels.runtime.graph_capture import captured_after_a_call

_Shape = tuple[int, int, int]  # rows, tokens of each, longest


class Predicted(NamedTuple):
    """After each chunk: logits FP16 [B, vocab], and the likeliest token int64 [B]."""

    logits: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Captured:
    """A captured prefill. chunks: input buffers. predicted: output buffers."""

    graph: torch.cuda.CUDAGraph
    chunks: Chunks
    predicted: Predicted


class PrefillRunner:
    """Runs prefills, which write keys and values to the caches and predict the next token."""

    def __init__(self, decoder: Decoder, caches: list[KvLayer], choose: ChooseConfig) -> None:
        self._decoder, self._caches, self._choose = decoder, caches, choose
        self._device = decoder.model.device
        self._captured: dict[_Shape, _Captured] = {}
        self._workspaces = Workspaces(self._device, choose)
        # Graphs run one after the other and keep no data in the pool, so all share one.
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None

    def read(self, chunks: Chunks) -> Predicted:
        """Prefill chunks; returns what follows them, valid until the next call."""
        rows, tokens = chunks.tokens.shape
        shape = self._captured.get((rows, tokens, chunks.longest))
        if shape is None:
            # Not cached, as prompts may have any length.
            work = Workspace(rows * tokens, self._device, self._choose)
            last = Workspace(rows, self._device, self._choose)
            logits = self._decoder.prefill(work, last, chunks, self._caches)
            return Predicted(logits, logits.argmax(dim=1))
        shape.chunks.tokens.copy_(chunks.tokens)
        shape.chunks.starts.copy_(chunks.starts)
        shape.chunks.counts.copy_(chunks.counts)
        shape.chunks.slots.copy_(chunks.slots)
        shape.graph.replay()
        return shape.predicted

    def prepare(self, rows: int, tokens: int, longest: int) -> None:
        """Capture the CUDA graph of a shape; does nothing on a CPU.

        This writes to slot 0, so call it before sequences are admitted.
        """
        if self._device.type != "cuda" or (rows, tokens, longest) in self._captured:
            return
        chunks = self._empty(rows, tokens, longest)
        first = torch.zeros(rows, dtype=torch.int64, device=self._device)
        logits: list[torch.Tensor] = []  # of each call, the last of which is captured
        graph = captured_after_a_call(
            lambda: logits.append(self._run(chunks, first)), pool=self._pool
        )
        predicted = Predicted(logits[-1], first)
        self._captured[rows, tokens, longest] = _Captured(graph, chunks, predicted)

    def close(self) -> None:
        """Free graphs and buffers."""
        for captured_prefill in self._captured.values():
            captured_prefill.graph.reset()
        self._captured.clear()
        self._workspaces.clear()

    def _run(self, chunks: Chunks, first: torch.Tensor) -> torch.Tensor:
        rows, tokens = chunks.tokens.shape
        work, last = self._workspaces[rows * tokens], self._workspaces[rows]
        logits = self._decoder.prefill(work, last, chunks, self._caches)
        first.copy_(logits.argmax(dim=1))
        return logits

    def _empty(self, rows: int, tokens: int, longest: int) -> Chunks:
        def constant(value: int) -> torch.Tensor:
            return torch.full((rows,), value, dtype=torch.int64, device=self._device)

        ids = torch.zeros(rows, tokens, dtype=torch.int32, device=self._device)
        return Chunks(ids, constant(0), constant(1), constant(0), longest)

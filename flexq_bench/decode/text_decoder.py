"""Logits of texts by a loaded model: many tokens as prompts are read, one as it is decoded."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.decode.decoder import Decoder, Model, Pieces
from flexq_bench.decode.engine import bucket_of
from flexq_bench.decode.layers import ChooseConfig, Workspace
from kernels.contract import Backend
from kernels.decoder import DecoderOperations, KvLayer
from kernels.decoder.cuda_operations import CudaOperations
from kernels.decoder.kv import empty_layer
from kernels.decoder.torch_operations import TorchOperations

# Tokens of one launch. Bit planes of a CPU take 36 numbers for a product; a GPU has enough of 2048.
MOST_TOKENS: dict[Backend, int] = {"cpu": 128, "cuda": 2048}


@dataclass(slots=True)
class TextState:
    """Keys and values of some texts so far. lengths: int64 [B]. longest: no text is longer."""

    caches: list[KvLayer]
    lengths: torch.Tensor
    longest: int = 0

    @property
    def capacity(self) -> int:
        return self.caches[0].capacity

    def reserve(self, capacity: int) -> None:
        """Have room for texts of so many tokens: what is kept moves to larger buffers."""
        if capacity <= self.capacity:
            return
        for index, cache in enumerate(self.caches):
            codes = _longer(cache.codes, capacity)
            scales = None if cache.scales is None else _longer(cache.scales, capacity)
            self.caches[index] = KvLayer(codes, scales, cache.bits)


class TextDecoder:
    """The forward pass that `decode` runs, with the logits of every token.

    choose: as Engine takes it; None: the kernels' own heuristics. kv_bits: of keys and values.

    More than MOST_TOKENS are computed one part after the other: fewer texts at once, then fewer
    tokens of each. So logits don't depend on how many texts there are beside each other, but where
    that changes how many tokens a GEMM has, whose sums then have another order.
    """

    def __init__(
        self, model: Model, *, kv_bits: int = 16, choose: ChooseConfig | None = None
    ) -> None:
        self.model = model
        self._kv_bits, self._choose = kv_bits, choose or _heuristic
        self._stepping: tuple[Decoder, Workspace] | None = None

    def empty(self, texts: int, capacity: int) -> TextState:
        """The state of texts that have no token yet and will have `capacity` at most."""
        device, shape = self.model.device, self.model.attention
        caches = [
            empty_layer(texts, shape.kv_heads, capacity, shape.head_dim, self._kv_bits, device)
            for _ in self.model.blocks
        ]
        return TextState(caches, torch.zeros(texts, dtype=torch.int64, device=device))

    @torch.no_grad()
    def read(
        self,
        tokens: torch.Tensor,
        state: TextState,
        *,
        counts: torch.Tensor | None = None,
        last_only: bool = False,
    ) -> torch.Tensor:
        """Logits FP16 [B, T, vocab] of tokens int [B, T] that follow what `state` has; adds them.

        counts: int64 [B], how many tokens of each row are of its text; the others stand behind
        these, and their logits mean nothing. None: all. last_only: [B, 1, vocab], of each text's
        last token. One token behind others is a step of `decode`; several, or the first, are a
        prompt. Texts that outgrow the state's capacity get more.
        """
        rows, length = tokens.shape
        if state.longest + length > state.capacity:
            state.reserve(bucket_of(state.longest + length, self._most_positions))
        counts = torch.full_like(state.lengths, length) if counts is None else counts
        if length == 1 and state.longest > 0:
            logits = self._step(tokens[:, 0], state)
        elif last_only and rows * length <= MOST_TOKENS[self._backend]:
            logits = self._last(tokens, state, counts)
        else:
            logits = self._all(tokens, state)
            if last_only:
                logits = logits[torch.arange(rows, device=logits.device), counts - 1][:, None]
        state.lengths += counts
        state.longest += length
        return logits

    @property
    def _most_positions(self) -> int:
        return self.model.architecture.dimensions.context

    @property
    def _backend(self) -> Backend:
        return "cuda" if self.model.device.type == "cuda" else "cpu"

    def _step(self, tokens: torch.Tensor, state: TextState) -> torch.Tensor:
        rows = len(tokens)
        if self._stepping is None or self._stepping[1].m != rows:
            self._stepping = self._decoder(), self._workspace(rows)
        decoder, work = self._stepping
        longest = bucket_of(state.longest + 1, state.capacity)
        positions = state.lengths.int()
        return decoder.step(work, tokens.int(), positions, state.caches, longest)[:, None].clone()

    def _last(self, tokens: torch.Tensor, state: TextState, counts: torch.Tensor) -> torch.Tensor:
        rows, length = tokens.shape
        slots = torch.arange(rows, device=tokens.device)
        pieces = Pieces(tokens.int(), state.lengths, counts, slots, state.longest + length)
        work, last = self._workspace(tokens.numel()), self._workspace(rows)
        return self._decoder().prefill(work, last, pieces, state.caches)[:, None]

    def _all(self, tokens: torch.Tensor, state: TextState) -> torch.Tensor:
        rows, length = tokens.shape
        most = MOST_TOKENS[self._backend]
        # Operators and workspaces keep buffers by their sizes: of this call alone.
        decoder, workspaces = self._decoder(), dict[int, Workspace]()
        vocabulary = self.model.architecture.dimensions.vocab
        logits = torch.empty(
            rows, length, vocabulary, dtype=torch.float16, device=self.model.device
        )
        everyone = torch.arange(rows, device=tokens.device)
        for slots in torch.split(everyone, max(1, most // length)):
            for start in range(0, length, most):
                ids = tokens[slots, start : start + most].int()
                starts = state.lengths[slots] + start
                stop = start + ids.shape[1]
                counts = torch.full_like(starts, ids.shape[1])
                pieces = Pieces(ids, starts, counts, slots, state.longest + stop)
                work = workspaces.setdefault(ids.numel(), self._workspace(ids.numel()))
                flat = decoder.all_logits(work, pieces, state.caches)
                logits[slots, start:stop] = flat.view(*ids.shape, -1)
        return logits

    def _decoder(self) -> Decoder:
        return Decoder(self.model, operations_on(self.model.device))

    def _workspace(self, m: int) -> Workspace:
        return Workspace(m, self.model.device, self._choose)


def _longer(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    """A KvLayer's buffer [2, slots, KV heads, capacity, …] with zeros behind what it holds."""
    longer = buffer.new_zeros(*buffer.shape[:3], capacity, *buffer.shape[4:])
    longer[:, :, :, : buffer.shape[3]] = buffer
    return longer


def operations_on(device: torch.device) -> DecoderOperations:
    """The non-GEMM operators of a device: one kernel each on a GPU, torch's on a CPU."""
    return CudaOperations() if device.type == "cuda" else TorchOperations()


def _heuristic(*_: object) -> None:
    return None

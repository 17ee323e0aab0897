"""Logits of texts: several tokens as a prefill, one token as a decode step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexq_bench.decode.decoder import Chunks, Decoder, Model
from flexq_bench.decode.engine import bucket_of
from flexq_bench.decode.layers import ChooseConfig, Workspace, Workspaces
from flexq_bench.kernels.contract import Backend
from flexq_bench.kernels.decoder import DecoderOperations, KvLayer
from flexq_bench.kernels.decoder.cuda_operations import CudaOperations
from flexq_bench.kernels.decoder.kv import empty_layer
from flexq_bench.kernels.decoder.torch_operations import TorchOperations

# Tokens of one launch. On a CPU bit planes need 36 numbers per product; a GPU is busy with 2048.
MAX_LAUNCH_TOKENS: dict[Backend, int] = {"cpu": 128, "cuda": 2048}


@dataclass(slots=True)
class TextState:
    """Keys and values of texts. lengths: int64 [B]. longest: upper bound of them."""

    caches: list[KvLayer]
    lengths: torch.Tensor
    longest: int = 0

    @property
    def capacity(self) -> int:
        return self.caches[0].capacity

    def reserve(self, capacity: int) -> None:
        """Grow the buffers to `capacity` tokens per text, if they are smaller."""
        if capacity <= self.capacity:
            return
        for index, cache in enumerate(self.caches):
            codes = _longer(cache.codes, capacity)
            scales = None if cache.scales is None else _longer(cache.scales, capacity)
            self.caches[index] = replace(cache, codes=codes, scales=scales)


class TextDecoder:
    """The forward pass of `decode`, with the logits of every token.

    choose: as in Engine; None: the kernels' heuristics. kv_bits: of keys and values. More than
    MAX_LAUNCH_TOKENS tokens are split into several passes, first by texts, then by tokens. Logits
    depend on the number of texts only through the order of summation in a GEMM.
    """

    def __init__(
        self, model: Model, *, kv_bits: int = 16, choose: ChooseConfig | None = None
    ) -> None:
        self.model = model
        self._kv_bits, self._choose = kv_bits, choose or _heuristic
        self._stepping: tuple[Decoder, Workspace] | None = None

    def empty(self, texts: int, capacity: int) -> TextState:
        """Create the state of texts without tokens. capacity: initial buffer size in tokens."""
        device, shape = self.model.device, self.model.attention
        caches = [
            empty_layer(
                *(texts, shape.kv_heads, capacity, shape.head_dim, self._kv_bits, device),
                block.fp8_scales,
            )
            for block in self.model.blocks
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
        """Append tokens int [B, T] to the texts of `state`; returns logits FP16 [B, T, vocab].

        counts: int64 [B], valid tokens of each row; the others are padding at the end, with
        meaningless logits. None: all. last_only: return only the logits of each text's last token,
        [B, 1, vocab]. One token after others is computed as a decode step; several, or the first,
        as a prefill. The buffers of `state` grow if necessary.
        """
        rows, length = tokens.shape
        if state.longest + length > state.capacity:
            state.reserve(bucket_of(state.longest + length, self._max_positions))
        counts = torch.full_like(state.lengths, length) if counts is None else counts
        if length == 1 and state.longest > 0:
            logits = self._step(tokens[:, 0], state)
        elif last_only and rows * length <= MAX_LAUNCH_TOKENS[self._backend]:
            logits = self._last(tokens, state, counts)
        else:
            logits = self._all(tokens, state)
            if last_only:
                logits = logits[torch.arange(rows, device=logits.device), counts - 1][:, None]
        state.lengths += counts
        state.longest += length
        return logits

    @property
    def _max_positions(self) -> int:
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
        chunks = Chunks(tokens.int(), state.lengths, counts, slots, state.longest + length)
        work, last = self._workspace(tokens.numel()), self._workspace(rows)
        return self._decoder().prefill(work, last, chunks, state.caches)[:, None]

    def _all(self, tokens: torch.Tensor, state: TextState) -> torch.Tensor:
        rows, length = tokens.shape
        most = MAX_LAUNCH_TOKENS[self._backend]
        # Local, as operators and workspaces cache buffers by size.
        decoder, workspaces = self._decoder(), Workspaces(self.model.device, self._choose)
        vocabulary = self.model.architecture.dimensions.vocab
        logits = torch.empty(
            rows, length, vocabulary, dtype=torch.float16, device=self.model.device
        )
        all_slots = torch.arange(rows, device=tokens.device)
        for slots in torch.split(all_slots, max(1, most // length)):
            for start in range(0, length, most):
                ids = tokens[slots, start : start + most].int()
                starts = state.lengths[slots] + start
                stop = start + ids.shape[1]
                counts = torch.full_like(starts, ids.shape[1])
                chunks = Chunks(ids, starts, counts, slots, state.longest + stop)
                flat = decoder.all_logits(workspaces[ids.numel()], chunks, state.caches)
                logits[slots, start:stop] = flat.view(*ids.shape, -1)
        return logits

    def _decoder(self) -> Decoder:
        return Decoder(self.model, operations_on(self.model.device))

    def _workspace(self, m: int) -> Workspace:
        return Workspace(m, self.model.device, self._choose)


def _longer(buffer: torch.Tensor, capacity: int) -> torch.Tensor:
    """Copy a KvLayer's buffer [2, slots, KV heads, capacity, …] to a larger one, zero-padded."""
    longer = buffer.new_zeros(*buffer.shape[:3], capacity, *buffer.shape[4:])
    longer[:, :, :, : buffer.shape[3]] = buffer
    return longer


def operations_on(device: torch.device) -> DecoderOperations:
    """The non-GEMM operators of a device: CUDA kernels on a GPU, torch on a CPU."""
    return CudaOperations() if device.type == "cuda" else TorchOperations()


def _heuristic(*_: object) -> None:
    return None

"""Greedy decoding with a model and its KV cache, with a CUDA graph per batch size and length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexq_bench.decode.decoder import Chunks, Decoder, Model
from flexq_bench.decode.layers import ChooseConfig, Workspace, Workspaces
from flexq_bench.decode.prefill import PrefillRunner
from flexq_bench.decode.stopwatch import Stopwatch
from flexq_bench.errors import UsageError
from flexq_bench.kernels.decoder import DecoderOperations
from flexq_bench.kernels.decoder.kv import empty_layer
from flexq_bench.kernels.runtime.graph_capture import captured_after_a_call

_MIN_BUCKET_TOKENS = 128  # tokens: attention of shorter sequences takes the same time
_MAX_CAPTURED_TOKENS = 2048  # of a prefill: with more, launch overhead is hidden


@dataclass(frozen=True, slots=True)
class Generation:
    """Decoded tokens int64 [B, new]. prefill_ms: to the first token. step_ms: per further token."""

    tokens: torch.Tensor
    prefill_ms: float
    step_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _State:
    """Inputs and outputs of a step, at fixed addresses. history: [slots, capacity], by position."""

    tokens: torch.Tensor
    positions: torch.Tensor
    history: torch.Tensor


class Engine:
    """Greedy decoding. slots: concurrent sequences. capacity: tokens of each, prompt included."""

    def __init__(
        self,
        model: Model,
        operations: DecoderOperations,
        choose: ChooseConfig,
        *,
        slots: int,
        capacity: int,
        kv_bits: int = 16,
    ) -> None:
        self.model = model
        self.slots, self.capacity = slots, capacity
        self._choose, self._operations = choose, operations
        self._decoder = Decoder(model, operations)
        device, shape = model.device, model.attention
        self.caches = [
            empty_layer(
                *(slots, shape.kv_heads, capacity, shape.head_dim, kv_bits, device),
                block.fp8_scales,
            )
            for block in model.blocks
        ]
        self._state = _State(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, capacity, dtype=torch.int64, device=device),
        )
        self._prompts = PrefillRunner(self._decoder, self.caches, choose)
        self._workspaces = Workspaces(device, choose)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._logits: dict[tuple[int, int], torch.Tensor] = {}  # of the latest step, or its graph's

    @property
    def history(self) -> torch.Tensor:
        """int64 [slots, capacity]: the decoded token at each position."""
        return self._state.history

    @property
    def cache_token_bytes(self) -> int:
        """Bytes of the cache, and of history, that one more token of each slot takes."""
        scales = [cache.scales for cache in self.caches if cache.scales is not None]
        parts = (*(cache.codes for cache in self.caches), *scales, self.history)
        return sum(part.nbytes for part in parts) // self.capacity

    @property
    def tokens(self) -> torch.Tensor:
        """int32 [slots]: each slot's newest token, which the next step reads."""
        return self._state.tokens

    @property
    def positions(self) -> torch.Tensor:
        """int32 [slots]: position of each slot's newest token."""
        return self._state.positions

    @torch.inference_mode()
    def generate(
        self,
        prompts: torch.Tensor,
        new: int,
        on_pass: Callable[[int, torch.Tensor], None] = lambda position, logits: None,
    ) -> Generation:
        """Decode `new` tokens after prompts int32 [B, T], each sequence in its own slot.

        on_pass: called after the prompts and each step with the position that they predicted and
        the logits FP16 [B, vocab]; it may change `tokens`.
        """
        batch, length = prompts.shape
        check_length(length, new, self.capacity)
        buckets = [self.bucket(length + step) for step in range(1, new)]
        for bucket in dict.fromkeys(buckets):
            self.prepare(batch, bucket)
        chunks = self._one_chunk_each(prompts)
        if batch * length <= _MAX_CAPTURED_TOKENS:
            self.prepare_prompts(batch, length, chunks.longest)
        watch = Stopwatch(self.model.device)
        watch.mark()
        on_pass(length, self.read(chunks, batch))
        watch.mark()
        for position, bucket in enumerate(buckets, start=length + 1):
            on_pass(position, self.advance(batch, bucket))
            watch.mark()
        prefill, *steps = watch.intervals_ms()
        tokens = self._state.history[:batch, length : length + new].clone()
        return Generation(tokens, prefill, tuple(steps))

    @torch.inference_mode()
    def read(self, chunks: Chunks, used: int) -> torch.Tensor:
        """Prefill the chunks of the first `used` rows; returns their logits, as `advance` does.

        Each slot's position is then the end of its chunk, with the predicted next token. If the
        prompt continues, decode steps before the next chunk produce tokens that are ignored.
        """
        predicted = self._prompts.read(chunks)
        first = predicted.first[:used]
        slots = chunks.slots[:used]
        ends = chunks.starts[:used] + chunks.counts[:used]
        self._state.tokens[slots] = first.int()
        self._state.positions[slots] = ends.int()
        self._state.history[slots, ends] = first
        return predicted.logits[:used]

    @torch.inference_mode()
    def prepare_prompts(self, rows: int, tokens: int, longest: int) -> None:
        """Capture a prefill of this shape, as `prepare` does for steps."""
        self._prompts.prepare(rows, tokens, longest)

    @torch.inference_mode()
    def logits(self, prompts: torch.Tensor, *, first_slot: int = 0, start: int = 0) -> torch.Tensor:
        """FP16 [B, T, vocab] at every position of prompts int32 [B, T]; fills the cache.

        The sequences use the slots from first_slot on, and continue what is there from `start` on.
        """
        batch, length = prompts.shape
        work = Workspace(batch * length, self.model.device, self._choose)
        chunks = self._one_chunk_each(prompts, first_slot, start)
        flat = self._decoder.all_logits(work, chunks, self.caches)
        return flat.view(batch, length, -1).clone()

    @torch.inference_mode()
    def prepare(self, batch: int, bucket: int) -> None:
        """Capture the CUDA graph of this batch and bucket; does nothing on a CPU.

        This runs steps, so call it before sequences are admitted.
        """
        if self.model.device.type != "cuda" or (batch, bucket) in self._graphs:
            return
        self._graphs[batch, bucket] = captured_after_a_call(lambda: self._step(batch, bucket))

    @torch.inference_mode()
    def advance(self, batch: int, bucket: int) -> torch.Tensor:
        """Decode a token for the first `batch` slots, none of them longer than the bucket.

        Returns logits FP16 [B, vocab], valid until the next call.
        """
        graph = self._graphs.get((batch, bucket))
        if graph is None:
            self._step(batch, bucket)
        else:
            graph.replay()
        return self._logits[batch, bucket]

    def clear(self, slot: int) -> None:
        """Mark a slot as unused, so that its attention covers one token only."""
        self._state.positions[slot] = 0

    def bucket(self, length: int) -> int:
        """The bucket of the longest sequence's length; see bucket_of."""
        return bucket_of(length, self.capacity)

    def close(self) -> None:
        """Free graphs and buffers."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._logits.clear()
        self._prompts.close()
        self._workspaces.clear()
        self.caches.clear()

    def _one_chunk_each(self, prompts: torch.Tensor, first_slot: int = 0, start: int = 0) -> Chunks:
        batch, length = prompts.shape
        slots = torch.arange(first_slot, first_slot + batch, device=self.model.device)
        starts, counts = torch.full_like(slots, start), torch.full_like(slots, length)
        return Chunks(prompts, starts, counts, slots, start + length)

    def _step(self, batch: int, bucket: int) -> None:
        state = self._state
        tokens, positions = state.tokens[:batch], state.positions[:batch]
        work = self._workspaces[batch]
        logits = self._decoder.step(work, tokens, positions, self.caches, bucket)
        self._logits[batch, bucket] = logits
        # Unused slots are decoded too, and stay at the last position.
        self._operations.pick(logits, tokens, positions, state.history)


def check_length(prompt: int, new: int, capacity: int) -> None:
    """Raise UsageError if a sequence would not fit."""
    if prompt < 1 or new < 1:
        raise UsageError(f"a prompt and its answer have at least 1 token: got {prompt} and {new}")
    if prompt + new > capacity:
        raise UsageError(
            f"{prompt} prompt and {new} new tokens are more than the {capacity} that were "
            "planned for: ask for fewer"
        )


def bucket_of(length: int, capacity: int) -> int:
    """Length for which a step's attention is captured: `length` rounded up, at most `capacity`."""
    rounded = max(_MIN_BUCKET_TOKENS, 1 << (length - 1).bit_length())
    # Also 3/4 of powers of two, so that a bucket is at most about 50 % too long.
    if length <= rounded * 3 // 4 and rounded > _MIN_BUCKET_TOKENS:
        rounded = rounded * 3 // 4
    return min(rounded, capacity)

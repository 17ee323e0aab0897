"""A loaded model with its KV cache: prompts in, tokens out, a CUDA graph a batch and length."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.decode.decoder import Decoder, Model, Pieces
from flexq_bench.decode.layers import ChooseConfig, Workspace
from flexq_bench.decode.prefill import PromptReader
from flexq_bench.decode.stopwatch import stopwatch
from flexq_bench.errors import UsageError
from kernels.decoder import DecoderOperations
from kernels.decoder.kv import empty_layer
from kernels.runtime.graph_capture import captured

_SHORTEST_BUCKET = 128  # tokens: attention of shorter sequences costs the same
_MOST_CAPTURED_TOKENS = 2048  # of prompts: launches of more are hidden behind their work


@dataclass(frozen=True, slots=True)
class Generation:
    """tokens: int64 [B, new]. prefill_ms: until the first token. step_ms: of each further token."""

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
    """Greedy decoding. slots: sequences at a time. capacity: tokens of one, prompt included."""

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
            empty_layer(slots, shape.kv_heads, capacity, shape.head_dim, kv_bits, device)
            for _ in model.blocks
        ]
        self._state = _State(
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int32, device=device),
            torch.zeros(slots, capacity, dtype=torch.int64, device=device),
        )
        self._prompts = PromptReader(self._decoder, self.caches, choose)
        self._workspaces: dict[int, Workspace] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    @property
    def history(self) -> torch.Tensor:
        """int64 [slots, capacity]: the token at each position, as far as it was decoded."""
        return self._state.history

    @property
    def positions(self) -> torch.Tensor:
        """int32 [slots]: where each slot's newest token stands."""
        return self._state.positions

    def check_length(self, prompt: int, new: int) -> None:
        """Raise UsageError if a sequence would not fit."""
        if prompt < 1 or new < 1:
            raise UsageError(
                f"a prompt and its answer have at least 1 token: got {prompt} and {new}"
            )
        if prompt + new > self.capacity:
            raise UsageError(
                f"{prompt} prompt and {new} new tokens are more than the {self.capacity} that were "
                "planned for: ask for fewer"
            )

    @torch.inference_mode()
    def generate(self, prompts: torch.Tensor, new: int) -> Generation:
        """`new` greedy tokens after prompts int32 [B, T], each sequence in its own slot."""
        batch, length = prompts.shape
        self.check_length(length, new)
        buckets = [self.bucket(length + step) for step in range(1, new)]
        for bucket in dict.fromkeys(buckets):
            self.prepare(batch, bucket)
        whole = self._whole(prompts)
        if batch * length <= _MOST_CAPTURED_TOKENS:
            self.prepare_prompts(batch, length, whole.longest)
        watch = stopwatch(self.model.device)
        watch.mark()
        self.read(whole, batch)
        watch.mark()
        for bucket in buckets:
            self.advance(batch, bucket)
            watch.mark()
        prefill, *steps = watch.intervals_ms()
        tokens = self._state.history[:batch, length : length + new].clone()
        return Generation(tokens, prefill, tuple(steps))

    @torch.inference_mode()
    def read(self, pieces: Pieces, used: int) -> None:
        """Read a piece of a prompt into each of the first `used` rows' slots.

        Each slot then stands at its piece's end and has the token that follows it: where the
        prompt goes on, steps in between decode what nobody asks for.
        """
        first = self._prompts.read(pieces)[:used]
        slots = pieces.slots[:used]
        ends = pieces.starts[:used] + pieces.counts[:used]
        self._state.tokens[slots] = first.int()
        self._state.positions[slots] = ends.int()
        self._state.history[slots, ends] = first

    @torch.inference_mode()
    def prepare_prompts(self, rows: int, tokens: int, longest: int) -> None:
        """Capture the reading of pieces of this shape, as `prepare` does for steps."""
        self._prompts.prepare(rows, tokens, longest)

    @torch.inference_mode()
    def logits(self, prompts: torch.Tensor) -> torch.Tensor:
        """FP16 [B, T, vocab] at every position of prompts int32 [B, T]; fills the cache."""
        batch, length = prompts.shape
        work = Workspace(batch * length, self.model.device, self._choose)
        flat = self._decoder.all_logits(work, self._whole(prompts), self.caches)
        return flat.view(batch, length, -1).clone()

    @torch.inference_mode()
    def prepare(self, batch: int, bucket: int) -> None:
        """Capture the step of this batch and bucket, where there are graphs.

        Steps run meanwhile: call it before sequences are admitted.
        """
        if self.model.device.type != "cuda" or (batch, bucket) in self._graphs:
            return
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(batch, bucket)  # compiles, tunes and allocates, which can't be captured
        stream.synchronize()
        with captured(stream) as graph:
            self._step(batch, bucket)
        self._graphs[batch, bucket] = graph
        torch.cuda.current_stream().wait_stream(stream)

    @torch.inference_mode()
    def advance(self, batch: int, bucket: int) -> None:
        """One more token for the first `batch` slots, none of them longer than the bucket."""
        graph = self._graphs.get((batch, bucket))
        if graph is None:
            self._step(batch, bucket)
        else:
            graph.replay()

    def clear(self, slot: int) -> None:
        """Nobody uses a slot: until it is filled again its steps look at one token."""
        self._state.positions[slot] = 0

    def bucket(self, length: int) -> int:
        """Tokens that attention is laid out for where the longest sequence has `length`."""
        return bucket_of(length, self.capacity)

    def close(self) -> None:
        """Let go of graphs and buffers."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._prompts.close()
        self._workspaces.clear()
        self.caches.clear()

    def _whole(self, prompts: torch.Tensor) -> Pieces:
        batch, length = prompts.shape
        slots = torch.arange(batch, device=self.model.device)
        return Pieces(
            prompts, torch.zeros_like(slots), torch.full_like(slots, length), slots, length
        )

    def _step(self, batch: int, bucket: int) -> None:
        state = self._state
        tokens, positions = state.tokens[:batch], state.positions[:batch]
        work = self._workspace(batch)
        logits = self._decoder.step(work, tokens, positions, self.caches, bucket)
        # A slot that nobody uses goes on, and stays at its end.
        self._operations.pick(logits, tokens, positions, state.history)

    def _workspace(self, m: int) -> Workspace:
        if m not in self._workspaces:
            self._workspaces[m] = Workspace(m, self.model.device, self._choose)
        return self._workspaces[m]


def bucket_of(length: int, capacity: int) -> int:
    """Tokens that a step's attention is laid out for: `length` rounded up, `capacity` at most."""
    rounded = max(_SHORTEST_BUCKET, 1 << (length - 1).bit_length())
    # Between powers of two, so that attention never looks past twice a third too far.
    if length <= rounded * 3 // 4 and rounded > _SHORTEST_BUCKET:
        rounded = rounded * 3 // 4
    return min(rounded, capacity)

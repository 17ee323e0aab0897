"""The forward pass of a decoder like LLaMA or OPT: prefill, and steps of one token per sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.decode.architecture import OPT_POSITION_OFFSET, DecoderArchitecture
from flexq_bench.decode.experts import PackedExperts
from flexq_bench.decode.layers import PackedLinear, Workspace
from flexq_bench.decode.tensor_parallel import with_row_ends
from flexq_bench.kernels.decoder import (
    AttentionShape,
    DecoderOperations,
    Destination,
    HeadNorms,
    KvLayer,
    Norm,
    WeightedRows,
)
from flexq_bench.kernels.runtime.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Norms and linear layers of a block. head_norms: applied before rotation; None: none.

    fp8_scales: of its KV cache, as in KvLayer; None: the cache is not rounded to FP8.
    """

    attention_norm: Norm
    ffn_norm: Norm
    qkv: PackedLinear
    out: PackedLinear
    widen: PackedLinear  # gate_up_proj or fc1, or the router of experts
    down: PackedLinear | PackedExperts  # down_proj or fc2, or all layers of the experts
    head_norms: HeadNorms | None
    fp8_scales: torch.Tensor | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """Linear layers in the order of the forward pass, without those of experts."""
        dense = self.qkv, self.out, self.widen
        return dense if isinstance(self.down, PackedExperts) else (*dense, self.down)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights of linear layers."""
        experts = self.down.nbytes if isinstance(self.down, PackedExperts) else 0
        return experts + sum(linear.nbytes for linear in self.linears)


@dataclass(frozen=True, slots=True)
class Model:
    """Weights on a device, ready to run.

    ranks: with which this process shares each layer (see tensor_parallel); the architecture,
    attention and linear layers are those of one rank.
    """

    architecture: DecoderArchitecture
    embedding: torch.Tensor  # [vocab, hidden]
    learned_positions: torch.Tensor | None
    blocks: tuple[DecoderBlock, ...]
    norm: Norm
    head: PackedLinear
    attention: AttentionShape
    ranks: Ranks = ALONE

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def kernels(self) -> dict[str, str]:
        """Kernel label of each fused layer by name; comma-separated if blocks differ."""
        labels: dict[str, list[str]] = {}
        for block in self.blocks:
            for linear in block.linears:
                labels.setdefault(linear.name, []).append(linear.kernel.spec.label)
            if isinstance(block.down, PackedExperts):
                labels.setdefault("experts", []).append(block.down.label)
        return {
            name: ",".join(dict.fromkeys(block_labels)) for name, block_labels in labels.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        tables = [
            self.embedding,
            *([] if self.learned_positions is None else [self.learned_positions]),
        ]
        tables_bytes = sum(table.numel() * table.element_size() for table in tables)
        shares_head = any(
            buffer.data_ptr() == self.embedding.data_ptr()
            for buffer in self.head.weights.buffers.values()
        )
        head = 0 if shares_head else self.head.nbytes
        return tables_bytes + head + sum(block.nbytes for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Input of a prefill: one chunk per row. tokens: int32 [B, T], padded at the end.

    starts, counts, slots: int64 [B], position of a chunk's first token, number of tokens, and slot.
    longest: upper bound of the chunks' end positions. Padding past the end of the cache is written
    to its last position.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    slots: torch.Tensor
    longest: int


class Decoder:
    """Runs a model. Launches go to the current stream; `step` can be captured in a CUDA graph."""

    def __init__(self, model: Model, operations: DecoderOperations) -> None:
        self.model = model
        self._operations = operations

    def step(
        self,
        work: Workspace,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        caches: list[KvLayer],
        longest: int,
    ) -> torch.Tensor:
        """Compute logits FP16 [B, vocab] after one more token per sequence.

        tokens, positions: int32 [B]. caches: one per layer, sequence b in slot b. longest: upper
        bound of the sequences' lengths, including this token.
        """
        shape = self.model.attention

        def attend(block: DecoderBlock, cache: KvLayer) -> torch.Tensor:
            qkv, k = work.multiply(block.qkv), shape.heads * shape.head_dim
            destination = self._destination(work, block.out, k)
            norms = block.head_norms
            self._operations.attend(qkv, shape, cache, positions, longest, destination, norms)
            return self._added(work, block.out, k)

        residual = self._embed(tokens, positions)
        delta: torch.Tensor | WeightedRows | None = None
        for block, cache in zip(self.model.blocks, caches, strict=True):
            residual = self._norm(work, residual, delta, block.attention_norm, block.qkv)
            attended = attend(block, cache)
            residual, delta = self._feed_forward(
                work, residual, attended, block, as_rows=self._operations.adds_rows
            )
        self._norm(work, residual, delta, self.model.norm, self.model.head)
        return self._logits(work)

    def prefill(
        self, work: Workspace, last: Workspace, chunks: Chunks, caches: list[KvLayer]
    ) -> torch.Tensor:
        """Logits FP16 [B, vocab] after the last token of each chunk.

        work: workspace of B · T tokens; last: of B.
        """
        residual, delta = self._prompt(work, chunks, caches)
        hidden = self.model.architecture.dimensions.hidden
        rows, tokens = chunks.tokens.shape
        ends = torch.arange(rows, device=chunks.tokens.device) * tokens + chunks.counts - 1
        self._norm(
            last,
            residual.view(-1, hidden)[ends].contiguous(),
            delta.view(-1, hidden)[ends].contiguous(),
            self.model.norm,
            self.model.head,
        )
        return self._logits(last)

    def all_logits(self, work: Workspace, chunks: Chunks, caches: list[KvLayer]) -> torch.Tensor:
        """Logits FP16 [B · T, vocab] at every position of the chunks."""
        residual, delta = self._prompt(work, chunks, caches)
        self._norm(work, residual, delta, self.model.norm, self.model.head)
        return self._logits(work)

    def _logits(self, work: Workspace) -> torch.Tensor:
        logits = work.multiply(self.model.head)
        if logits.shape[1] == self.model.architecture.dimensions.vocab:
            return logits
        return self.model.ranks.joined(logits)

    def _prompt(
        self, work: Workspace, chunks: Chunks, caches: list[KvLayer]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, length = chunks.tokens.shape
        shape = self.model.attention
        within = torch.arange(length, device=chunks.tokens.device)
        positions = (chunks.starts[:, None] + within).clamp(max=caches[0].capacity - 1)
        residual = self._embed(chunks.tokens.flatten(), positions.flatten())
        delta: torch.Tensor | WeightedRows | None = None
        for block, cache in zip(self.model.blocks, caches, strict=True):
            residual = self._norm(work, residual, delta, block.attention_norm, block.qkv)
            qkv = work.multiply(block.qkv)
            if block.head_norms is not None:
                self._operations.norm_heads(qkv, shape, block.head_norms)
            qkv = qkv.view(rows, length, -1)
            attended = self._operations.attend_prompts(
                qkv, shape, cache, chunks.slots, positions, chunks.longest
            )
            if block.out.weights.k != attended.shape[1]:
                attended = with_row_ends(attended, block.out.weights.k, self.model.ranks)
            out = self.model.ranks.add(work.apply(block.out, attended))
            residual, delta = self._feed_forward(work, residual, out, block, as_rows=False)
        assert isinstance(delta, torch.Tensor)  # a model has at least one block
        return residual, delta

    def _feed_forward(
        self,
        work: Workspace,
        residual: torch.Tensor,
        delta: torch.Tensor,
        block: DecoderBlock,
        *,
        as_rows: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | WeightedRows]:
        if as_rows and self._operations.routes_norms and isinstance(block.down, PackedExperts):
            mixed = work.mix_norm(block.widen, block.down, residual, delta, block.ffn_norm)
            if mixed is not None:
                return mixed
        residual = self._norm(work, residual, delta, block.ffn_norm, block.widen)
        if isinstance(block.down, PackedExperts):
            return residual, work.mix(block.widen, block.down, as_rows=as_rows)
        wide = work.multiply(block.widen)
        k = self.model.architecture.dimensions.ffn
        destination = self._destination(work, block.down, k)
        if self.model.architecture.block == "opt":
            self._operations.relu(wide, destination)
        else:
            self._operations.silu_mul(wide, destination)
        return residual, self._added(work, block.down, k)

    def _destination(self, work: Workspace, linear: PackedLinear, k: int) -> Destination:
        """The buffer for the K activations of a layer, unpacked if its rows have ends to share."""
        if linear.weights.k == k:
            return work.destination(linear)
        return work.dense(self.model.head.kernel, k)

    def _added(self, work: Workspace, linear: PackedLinear, k: int) -> torch.Tensor:
        """The layer's output for the activations in `_destination`, summed over the ranks."""
        ranks = self.model.ranks
        if linear.weights.k == k:
            return ranks.add(work.multiply(linear))
        x = work.dense(self.model.head.kernel, k).packed.buffers["values"][: work.m, :k]
        return ranks.add(work.apply(linear, with_row_ends(x, linear.weights.k, ranks)))

    def _norm(
        self,
        work: Workspace,
        residual: torch.Tensor,
        delta: torch.Tensor | WeightedRows | None,
        norm: Norm,
        linear: PackedLinear,
    ) -> torch.Tensor:
        return self._operations.norm(residual, delta, norm, work.destination(linear))

    def _embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        residual = self.model.embedding.index_select(0, tokens)
        if self.model.learned_positions is not None:
            rows = positions + OPT_POSITION_OFFSET
            residual += self.model.learned_positions.index_select(0, rows)
        return residual

"""CUDA implementation of the operators: csrc/decode/{operators,head_norm,attention,pick}.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import Packing, PackingKind
from flexq_bench.kernels.decoder.attention import (
    ATTENTION,
    MAX_SPLITS,
    WARPS,
    attention_build,
    can_pack,
    is_serial,
    split_count,
)
from flexq_bench.kernels.decoder.kv import KV_BITS, KvLayer
from flexq_bench.kernels.decoder.operations import (
    AttentionShape,
    Destination,
    HeadNorms,
    Norm,
    WeightedRows,
)
from flexq_bench.kernels.decoder.torch_operations import PromptAttention
from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.runtime.gpu import current_gpu
from flexq_bench.kernels.runtime.module import Argument, load_function
from flexq_bench.kernels.runtime.nvrtc import Block, Build

_RMS_NORM, _LAYER_NORM, _SILU_MUL, _RELU, _ATTENTION, _COPY = range(1, 7)
# Names of the kernels, as profiles show them.
NORM, HEAD_NORM, SILU_MUL, RELU, ATTENTION_SUM, PICK = (
    "decode_norm",
    "decode_head_norm",
    "decode_silu_mul",
    "decode_relu",
    "decode_attention_sum",
    "decode_pick",
)
_FUNCTIONS = {
    _RMS_NORM: NORM,
    _LAYER_NORM: NORM,
    _SILU_MUL: SILU_MUL,
    _RELU: RELU,
    _ATTENTION: ATTENTION_SUM,
    _COPY: ATTENTION_SUM,
}
_UNUSED = (None,) * 6  # inputs of operators with a single input tensor
_PACKINGS: dict[PackingKind, int] = {"halves": 0, "group-codes": 1, "row-codes": 2}
_WIDTH, _WARP, _GROUP = 4, 32, 128  # csrc/decode/operators.cu: values per thread, lanes, per warp
_MAX_THREADS, _FEW_THREADS = 1024, 128  # of a block that computes a row, or a part of one
# Attention of so many values is packed by the kernel, if they share a scale: at 5,120 a step of
# LLaMA-13B was 1.05 times as fast (batch 8, H200), at 576 one of SmolLM2-135M 0.97 times.
_LONG_ROW = 2048
_SUM_THREADS = 512  # of a block that reduces a row of attention: its threads hold several splits
_SPLIT_THREADS, _FEW_TOKENS = 256, 32  # norm of a row by several blocks: threads; largest M
_MAX_VECTORS = 3  # per thread of a norm by one block
_PICK_THREADS = 1024  # csrc/decode/pick.cu
_PICK_BLOCKS, _PICK_MANY = 8, 1 << 14  # of a sequence, from so many logits on
_HEAD_NORM_WARPS = 4  # csrc/decode/head_norm.cu: of a block, one head each


_PICK_BUILD = Build.of("decode/pick.cu", block=Block(PICK, _PICK_THREADS))


class CudaOperations(PromptAttention):
    """CUDA operators. Owns the intermediate buffers of launches, which captured graphs reuse.

    split_tokens: of a sequence for each split in attention, and norms are reduced by blocks of one
    size, so that no result depends on the batch; None: by the batch and the longest sequence.
    """

    def __init__(self, split_tokens: int | None = None) -> None:
        self._split_tokens = split_tokens
        self.routes_norms = split_tokens is None
        self._scratch: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    adds_rows = True

    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | WeightedRows | None,
        norm: Norm,
        to: Destination,
    ) -> torch.Tensor:
        producer = _RMS_NORM if norm.bias is None else _LAYER_NORM
        total = residual
        if delta is not None:
            # Double buffering: a block may read the old row while others write the new one.
            first, second = (
                self._buffer(name, tuple(residual.shape), torch.float16, residual)
                for name in ("first", "second")
            )
            total = second if residual.data_ptr() == first.data_ptr() else first
        rows = delta if isinstance(delta, WeightedRows) else None
        added = delta.rows if isinstance(delta, WeightedRows) else delta
        inputs = (residual, added, total, norm.weight, norm.bias, None, None)
        self._produce(producer, inputs, residual.shape, to, eps=norm.eps, rows=rows)
        return total

    def silu_mul(self, gate_up: torch.Tensor, to: Destination) -> None:
        shape = (gate_up.shape[0], gate_up.shape[1] // 2)
        self._produce(_SILU_MUL, (gate_up, *_UNUSED), shape, to)

    def relu(self, x: torch.Tensor, to: Destination) -> None:
        self._produce(_RELU, (x, *_UNUSED), x.shape, to)

    def norm_heads(self, qkv: torch.Tensor, shape: AttentionShape, norms: HeadNorms) -> None:
        blocks = -(-(shape.heads + shape.kv_heads) // _HEAD_NORM_WARPS)
        load_function(head_norm_build(shape.head_dim), HEAD_NORM).launch(
            (qkv.shape[0], blocks, 1),
            _HEAD_NORM_WARPS * _WARP,
            (
                qkv,
                norms.queries,
                norms.keys,
                float(norms.eps),
                shape.heads,
                shape.kv_heads,
                shape.width,
            ),
            overlap_previous=True,
        )

    def attend(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        positions: torch.Tensor,
        longest: int,
        to: Destination,
        norms: HeadNorms | None = None,
    ) -> None:
        packing = to.kernel.packing(to.packed, to.config)
        row = (qkv.shape[0], shape.heads * shape.head_dim)
        units = row[0] * shape.kv_heads
        splits = split_count(units, longest, current_gpu().sms, self._split_tokens)
        most = MAX_SPLITS
        if current_gpu().capability < (9, 0):  # no clusters: one way for all, if it is fixed
            most = 0 if self._split_tokens else 1
        halves = Packing("halves", 16, self._buffer("values", row, torch.float16, qkv))
        target = packing or halves
        if target.kind == "row-codes" and row[1] >= _LONG_ROW and can_pack(halves, shape):
            target = halves  # a row's scale needs all heads, which clusters reduce first
        if splits <= most and can_pack(target, shape):
            self._attend(qkv, shape, cache, positions, splits, target, norms)
        else:
            target = packing or halves
            self._attend(qkv, shape, cache, positions, splits, None, norms)
            inputs = (*_UNUSED[:5], *self._splits(row[0], shape, splits, qkv))
            self._launch(_ATTENTION, inputs, *row, target, 0.0, shape.head_dim, splits)
        if packing is None:
            to.kernel.activate(halves.values, to.packed)
        elif target is not packing:
            self._launch(_COPY, (halves.values, *_UNUSED), *row, packing, 0.0)

    def _attend(
        self,
        qkv: torch.Tensor,
        shape: AttentionShape,
        cache: KvLayer,
        positions: torch.Tensor,
        splits: int,
        packing: Packing | None,
        norms: HeadNorms | None,
    ) -> None:
        batch = qkv.shape[0]
        stride = scale_stride = 0
        sums = weights = None
        if packing is None:
            sums, weights = self._splits(batch, shape, splits, qkv)
        else:
            stride, scale_stride = _strides(packing)
        fp8 = cache.fp8_scales
        serial = self._split_tokens is not None and is_serial(
            shape, batch, splits, current_gpu().sms
        )
        build = attention_build(
            shape,
            cache.bits,
            packing,
            fp8=fp8 is not None,
            norms_heads=norms is not None,
            is_serial=serial,
        )
        load_function(build, ATTENTION).launch(
            (1 if serial else splits, shape.kv_heads, batch),
            WARPS * _WARP,
            (
                qkv,
                shape.rotary,
                positions,
                cache.keys,
                cache.values,
                cache.key_scales if fp8 is None else fp8[0],
                cache.value_scales if fp8 is None else fp8[1],
                None if packing is None else packing.values,
                None if packing is None else packing.scales,
                sums,
                weights,
                float(shape.head_dim**-0.5),
                cache.capacity,
                stride,
                scale_stride,
                0 if packing is None else int(packing.in_mma_order),
                self._split_tokens or 0,
                *((None, None, 0.0) if norms is None else (norms.queries, norms.keys, norms.eps)),
                splits,
            ),
            overlap_previous=True,
            cluster=1 if packing is None or serial else splits,
        )

    def _splits(
        self, batch: int, shape: AttentionShape, splits: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = (batch, shape.heads, splits, shape.head_dim)
        return (
            self._buffer("sums", sums, torch.float32, like),
            self._buffer("weights", (*sums[:3], 2), torch.float32, like),
        )

    def pick(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        history: torch.Tensor,
    ) -> None:
        batch, vocabulary = logits.shape
        has_clusters = current_gpu().capability >= (9, 0)
        blocks = _PICK_BLOCKS if has_clusters and vocabulary >= _PICK_MANY else 1
        load_function(_PICK_BUILD, PICK).launch(
            (blocks, batch, 1),
            _PICK_THREADS,
            (logits, tokens, positions, history, vocabulary, history.shape[1]),
            overlap_previous=True,
            cluster=blocks,
        )

    def _produce(
        self,
        producer: int,
        inputs: tuple[torch.Tensor | None, ...],
        shape: Sequence[int],
        to: Destination,
        *,
        eps: float = 0.0,
        rows: WeightedRows | None = None,
    ) -> None:
        m, k = shape
        packing, values = to.kernel.packing(to.packed, to.config), None
        if packing is None:
            device = next(iter(to.packed.buffers.values())).device
            values = self._buffer("values", (m, k), torch.float16, device)
            packing = Packing("halves", 16, values)
        self._launch(producer, inputs, m, k, packing, eps, rows=rows)
        if values is not None:
            to.kernel.activate(values, to.packed)

    def _launch(
        self,
        producer: int,
        inputs: tuple[torch.Tensor | None, ...],
        m: int,
        k: int,
        packing: Packing,
        eps: float,
        head_dim: int = 1,
        splits: int = 1,
        rows: WeightedRows | None = None,
    ) -> None:
        if k % _WIDTH:
            raise ShapeError(f"decoder operators need K divisible by {_WIDTH}, got {k}")
        stride = packing.values.shape[1]
        vectors = -(-max(k, stride) // _GROUP) * _WARP
        is_norm = producer in (_RMS_NORM, _LAYER_NORM)
        is_few = m <= _FEW_TOKENS or rows is not None
        blocks = cluster = 1
        if is_norm:
            # For few tokens several blocks compute the norm of a row, for many one block does.
            splits_row = is_few or vectors > _MAX_VECTORS * _MAX_THREADS
            is_fixed = self._split_tokens is not None
            per_thread = -(-vectors // (_SPLIT_THREADS if splits_row or is_fixed else _MAX_THREADS))
            threads = -(-vectors // (per_thread * _WARP)) * _WARP
            blocks = per_thread if splits_row else 1
        elif packing.kind == "row-codes":
            if is_few and vectors > _MAX_THREADS and current_gpu().capability >= (9, 0):
                blocks = cluster = MAX_SPLITS
            most = _SUM_THREADS if producer in (_ATTENTION, _COPY) else _MAX_THREADS
            per_thread = -(-vectors // (blocks * most))
            threads = -(-vectors // (blocks * per_thread * _WARP)) * _WARP
        else:
            per_thread, threads = 1, _FEW_THREADS
            blocks = -(-vectors // threads)
        build = node_build(
            producer,
            packing.kind,
            packing.bits,
            per_thread,
            threads,
            splits_row=is_norm and blocks > 1,
            is_mixture=rows is not None,
        )
        arguments: tuple[Argument, ...] = (
            *inputs,
            packing.values,
            packing.scales,
            float(eps),
            k,
            head_dim,
            splits,
            *_strides(packing),
            int(packing.in_mma_order),
            *(
                (None, None, 0)
                if rows is None
                else (rows.numbers, rows.shares, rows.shares.shape[1])
            ),
        )
        function = load_function(build, _FUNCTIONS[producer])
        grid = blocks, m, 1
        function.launch(grid, threads, arguments, overlap_previous=True, cluster=cluster)

    def _buffer(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        like: torch.Tensor | torch.device,
    ) -> torch.Tensor:
        """Return a persistent buffer, initially zero, that all layers share."""
        key = (name, shape)
        if key not in self._scratch:
            device = like.device if isinstance(like, torch.Tensor) else like
            self._scratch[key] = torch.zeros(shape, dtype=dtype, device=device)
        return self._scratch[key]


def _strides(packing: Packing) -> tuple[int, int]:
    """Return the strides of rows of values and of groups of scales."""
    if packing.kind != "group-codes" or packing.scales is None:
        return packing.values.shape[1], 0
    return packing.values.shape[1], packing.scales.shape[1]


def node_build(
    producer: int,
    kind: PackingKind,
    bits: int,
    vectors: int,
    threads: int,
    *,
    splits_row: bool = False,
    is_mixture: bool = False,
) -> Build:
    """Return the build of csrc/decode/operators.cu for a producer and its packing.

    vectors: of a thread. threads: of a block. splits_row: several blocks compute a row's norm.
    """
    return Build.of(
        "decode/operators.cu",
        block=Block(_FUNCTIONS[producer], threads),
        PRODUCER=producer,
        PACKING=_PACKINGS[kind],
        A_BITS=bits if kind != "halves" else 8,
        VECTORS=vectors,
        THREADS=threads,
        **({"SPLIT_ROW": 1} if splits_row else {}),
        **({"MIXTURE": 1} if is_mixture else {}),
    )


def head_norm_build(head_dim: int) -> Build:
    """Return the build of csrc/decode/head_norm.cu for a head size."""
    block = Block(HEAD_NORM, _HEAD_NORM_WARPS * _WARP)
    return Build.of("decode/head_norm.cu", block=block, HEAD_DIM=head_dim)


def builds() -> list[Build]:
    """Return a representative set: every operator and packing, head counts of the model catalog."""
    nothing = torch.empty(0)
    codes, halves = Packing("group-codes", 6, nothing), Packing("halves", 16, nothing)
    heads = [
        *((1, bits, codes) for bits in KV_BITS),
        (8, 16, None),
        (4, 8, halves),
        (4, 4, halves),
    ]
    attention = [
        attention_build(AttentionShape(group, 1, 128, nothing), bits, packing)
        for group, bits, packing in heads
    ]
    attention.append(
        attention_build(AttentionShape(8, 1, 128, nothing), 16, halves, norms_heads=True)
    )
    attention.append(attention_build(AttentionShape(3, 1, 64, nothing), 16, None, is_serial=True))
    kinds: tuple[tuple[PackingKind, int], ...] = (
        ("halves", 16),
        ("group-codes", 6),
        ("group-codes", 8),
        ("row-codes", 8),
    )
    nodes = [
        node_build(producer, kind, bits, vectors, threads, splits_row=splits_row)
        for producer in range(_RMS_NORM, _COPY + 1)
        for kind, bits in kinds
        if producer != _COPY or kind == "row-codes"
        for vectors, threads, splits_row in _blocks(producer, kind)
    ]
    nodes += [
        node_build(_RMS_NORM, kind, bits, vectors, 256, splits_row=vectors > 1, is_mixture=True)
        for kind, bits in (kinds[0], kinds[-1])
        for vectors in (1, 2, 4)
    ]
    return [*attention, *nodes, head_norm_build(128), _PICK_BUILD]


def _blocks(producer: int, kind: PackingKind) -> tuple[tuple[int, int, bool], ...]:
    """Return vectors per thread, threads per block, and if several blocks compute a row's norm.

    For few and many tokens of models of 4096 and 8192 features.
    """
    if producer in (_RMS_NORM, _LAYER_NORM):
        return (4, 256, True), (8, 256, True), (1, 1024, False), (2, 1024, False)
    if kind != "row-codes":
        return ((1, _FEW_THREADS, False),)
    if producer in (_ATTENTION, _COPY):
        return (1, 256, False), (2, 512, False), (4, 512, False)
    return (1, 352, False), (1, 896, False), (3, 928, False), (7, 1024, False)

"""Loading of a model to a device, block by block, and an estimate of the memory it needs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from flexq_bench.decode.architecture import NotDecodedError
from flexq_bench.decode.decoder import DecoderBlock, Model
from flexq_bench.decode.experts import PackedExperts, builds_of_experts, check_grouped, pack_layers
from flexq_bench.decode.fused_layers import UnlikePartsError
from flexq_bench.decode.layers import ChooseConfig, PackedLinear
from flexq_bench.decode.weights import (
    EXPERT_LAYERS,
    Affine,
    BlockWeights,
    WeightSource,
    dense_layer,
    layer_sizes,
)
from flexq_bench.errors import MeasureError, UsageError
from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import Backend, Kernel, LinearKernel
from flexq_bench.kernels.decoder import AttentionShape, HeadNorms, Norm
from flexq_bench.kernels.decoder.kv import token_bytes
from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.formats import FP16, NumberFormat
from flexq_bench.kernels.formats.scales import SCALE_TYPES
from flexq_bench.kernels.runtime.module import compile_ahead
from flexq_bench.kernels.runtime.ranks import ALONE, Ranks
from flexq_bench.measure.device import available_memory
from flexq_bench.schemes.kernel_choice import kernel_label, no_kernel_reason
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from flexq_bench.workloads.gemm import GemmWorkload

HEAD, ROUTER = "lm_head", "router"  # never quantized
_GIB = 1 << 30
RESERVE_BYTES = 1 << 30  # bytes for graphs, libraries' workspaces and allocator fragmentation
# Temporary bytes per weight while a layer is rounded or packed: FP16, FP32, quotients, codes.
_ROUNDING_BYTES_PER_WEIGHT = 16
_RAW_BYTES_PER_WEIGHT = 3  # bytes per weight of the block that is being loaded: FP16 and codes
# Per scale, zero point, and index in a channel order.
_SCALE_BYTES, _ZERO_BYTES, _ORDER_BYTES = 2, 1, 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of device memory. weights: packed. cache: keys and values. working: others, at most."""

    weights: int
    cache: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working

    def describe(self) -> str:
        return (
            f"{self.total / _GIB:.1f} GiB ({self.weights / _GIB:.1f} weights, "
            f"{self.cache / _GIB:.1f} KV cache, {self.working / _GIB:.1f} working space)"
        )


def footprint(source: WeightSource, batch: int, capacity: int, kv_bits: int) -> Footprint:
    """Estimate the device memory of decoding from the formats.

    Raises UsageError for a layer without a kernel.
    """
    architecture, formats = source.architecture, source.formats()
    model = architecture.dimensions
    sizes = layer_sizes(architecture)
    for name, layer_formats in formats.items():
        label_of(f"{name} of {model.name}", layer_formats)
    block = sum(packed_bytes(n, k, formats[name].weight) for name, n, k in sizes)
    cache = 2 * model.layers * model.kv_heads * capacity * batch
    cache *= token_bytes(architecture.head_dim, kv_bits)
    whole = [n * k for _, n, k in layer_sizes(source.whole)]
    largest, raw_block = max(whole) * _ROUNDING_BYTES_PER_WEIGHT, sum(whole) * _RAW_BYTES_PER_WEIGHT
    return Footprint(
        block * model.layers + model.embedding_parameters * 2,
        cache,
        largest + raw_block + RESERVE_BYTES,
    )


def check_memory(needed: Footprint, what: str, device: torch.device) -> None:
    """Raise MeasureError if the memory is not sufficient. what: the case, for the message."""
    free = available_memory(device)
    if needed.total > free:
        raise MeasureError(
            f"{what} needs {needed.describe()}, and {free / _GIB:.1f} GiB are free: pick a smaller "
            "batch, fewer tokens, --kv-bits 8, --gpus 2 or another scheme"
        )


def label_of(layer: str, formats: LayerFormats) -> str:
    """Label of the kernel that runs a layer. Raises UsageError with the reason if there is none."""
    if formats.rotated:
        raise UnlikePartsError(
            f"the input of {layer} is rotated, for which decode has no operator: `accuracy` and "
            "`gate accuracy` take it, or pick another scheme"
        )
    label = kernel_label(formats.weight, formats.activation)
    if label is None:
        why = no_kernel_reason(formats.weight, formats.activation)
        raise UsageError(
            f"{layer} is {formats.name}: {why}: pick another scheme (flexq-bench list schemes)"
        )
    return label


def check_layers(source: WeightSource) -> None:
    """Raise NotDecodedError if layers can't be fused, or no grouped kernel runs the experts."""
    model = source.architecture.dimensions
    try:
        formats = source.formats()
    except UnlikePartsError as error:
        raise NotDecodedError(str(error)) from error
    if model.experts is None:
        return
    check_grouped(model.name, {label_of(name, formats[name]) for name in EXPERT_LAYERS})


def linear_kernel(label: str, backend: Backend) -> LinearKernel:
    """The linear layer kernel of this label. Raises UsageError if the backend has none."""
    try:
        kernel: Kernel = registry.resolve(label, backend)
    except KernelError as error:
        raise UsageError(str(error)) from error
    if not isinstance(kernel, LinearKernel):
        raise UsageError(f"{label} is no linear layer: see `flexq-bench list kernels`")
    return kernel


def compile_layers(
    source: WeightSource, device: torch.device, choose: ChooseConfig, batches: Iterable[int]
) -> None:
    """Compile the kernels of steps of these sizes on several threads; does nothing on a CPU."""
    if device.type == "cpu":
        return
    model, batches = source.architecture.dimensions, list(batches)
    layers = [(name, label_of(name, source.formats()[name]), n, k)
              for name, n, k in layer_sizes(source.architecture)]  # fmt: skip
    layers.append((HEAD, label_of(HEAD, LayerFormats(FP16)), model.vocab, model.hidden))
    of_experts = [] if model.experts is None else layers[2:4]
    compile_ahead(
        build
        for layer in layers
        for _, label, n, k in [layer]
        if layer not in of_experts
        for kernel in [linear_kernel(label, "cuda")]
        for m in batches
        for build in kernel.builds_for(GemmWorkload(m, n, k), choose(kernel, m, n, k))
    )
    compile_ahead(
        build
        for _, label, _, _ in of_experts[:1]
        for m in batches
        for build in builds_of_experts(source.architecture, label, m)
    )


def load(
    source: WeightSource,
    device: torch.device,
    length: int,
    choose: ChooseConfig,
    batches: tuple[int, ...],
    on_block: Callable[[int], None] = lambda done: None,
    find: Callable[[str, Backend], LinearKernel] = linear_kernel,
    ranks: Ranks = ALONE,
) -> Model:
    """Load a model and pack its codes. length: largest number of tokens of a sequence.

    batches: batch sizes of steps; the configuration for the first one determines the layout of the
    weights. on_block: called with the number of loaded blocks. find: returns the kernel of a label.
    ranks: of the model, whose weights are the share of one.

    Raises UsageError for a layer without a kernel.
    """
    architecture = source.architecture
    backend: Backend = "cuda" if device.type == "cuda" else "cpu"
    dimensions = architecture.dimensions

    def pack(name: str, within: str, layer: QuantizedLayer) -> PackedLinear:
        kernel = find(label_of(f"{name} of {within}", layer.formats), backend)
        config = choose(kernel, batches[0], layer.weight.rows, layer.weight.k)
        packed = kernel.narrow(layer.packed_for(kernel), config)
        return PackedLinear(name, kernel, packed, layer.bias)

    def feed_forward(
        within: str, raw: BlockWeights
    ) -> tuple[PackedLinear, PackedLinear | PackedExperts]:
        if raw.router is None:
            widen, down = (pack(name, within, raw.linears.pop(name)) for name in names[2:])
            return widen, down
        gate_up, down_proj = (raw.linears.pop(name) for name in EXPERT_LAYERS)
        kernel = find(label_of(f"{EXPERT_LAYERS[0]} of {within}", gate_up.formats), backend)
        experts = pack_layers(architecture, kernel, gate_up, down_proj)
        return pack(ROUTER, within, dense_layer(raw.router)), experts

    def norm_of(part: Affine) -> Norm:
        return Norm(part.weight, part.bias, architecture.eps)

    blocks, names = [], [name for name, _, _ in layer_sizes(architecture)]
    for index in range(dimensions.layers):
        raw = source.block(index, device)
        within = f"{dimensions.name}, block {index}"
        qkv, out = (pack(name, within, raw.linears.pop(name)) for name in names[:2])
        widen, down = feed_forward(within, raw)
        heads = None if raw.head_norms is None else HeadNorms(*raw.head_norms, architecture.eps)
        norms = norm_of(raw.attention_norm), norm_of(raw.ffn_norm)
        scales = source.fp8_scales(index)
        scales = None if scales is None else scales.to(device)
        blocks.append(DecoderBlock(*norms, qkv, out, widen, down, heads, scales))
        on_block(index + 1)
    ends = source.ends(device)
    head = pack(HEAD, dimensions.name, dense_layer(ends.head))
    attention = AttentionShape(
        dimensions.heads,
        dimensions.kv_heads,
        architecture.head_dim,
        architecture.rotary(length, device),
    )
    embedding = ends.embedding
    if ends.head is embedding and _is_view(head, embedding):
        embedding = next(iter(head.weights.buffers.values()))
    model = Model(
        architecture,
        embedding,
        ends.positions,
        tuple(blocks),
        norm_of(ends.norm),
        head,
        attention,
        ranks,
    )
    release(device)
    return model


def release(device: torch.device) -> None:
    """Return cached GPU memory to the driver."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _is_view(head: PackedLinear, embedding: torch.Tensor) -> bool:
    """Return True if a packed head stores the embedding unchanged, so that one copy serves both."""
    buffers = list(head.weights.buffers.values())
    if len(buffers) != 1:
        return False
    return buffers[0].shape == embedding.shape and buffers[0].dtype == embedding.dtype


def packed_bytes(n: int, k: int, fmt: NumberFormat) -> int:
    """Bytes of packed weights [N,K] with their scales, without padding."""
    if fmt.is_dense:
        return n * k * fmt.bits // 8
    groups = 1 if fmt.group is None else -(-k // fmt.group)
    codes = n * k * fmt.bits // 8
    row_blocks = 1 if fmt.block_rows is None else -(-n // fmt.block_rows)
    scales = row_blocks * groups * SCALE_TYPES[fmt.scale].itemsize
    if fmt.kind == "asymmetric":
        return codes + scales + n * groups * _ZERO_BYTES
    if fmt.kind == "dual":
        return codes + scales + n * _SCALE_BYTES  # of groups, and of rows
    if fmt.kind == "mixed" and fmt.group is not None:
        # The last group has twice the bits, as an extra group of codes; plus the channel order.
        return codes + scales + n * (fmt.group * fmt.bits // 8 + _SCALE_BYTES) + k * _ORDER_BYTES
    return codes + scales

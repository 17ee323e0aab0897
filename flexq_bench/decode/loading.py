"""From weights to a model on a device, a block at a time, with what it takes said before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexq_bench.decode.decoder import Block, Model
from flexq_bench.decode.fused_layers import UnlikePartsError
from flexq_bench.decode.layers import ChooseConfig, PackedLinear
from flexq_bench.decode.weights import Affine, WeightSource, dense_layer, layer_sizes
from flexq_bench.errors import MeasureError, UsageError
from flexq_bench.schemes.kernel_choice import kernel_label, no_kernel_reason
from flexq_bench.schemes.layer_formats import LayerFormats
from flexq_bench.schemes.quantized_layer import QuantizedLayer
from kernels import registry
from kernels.contract import Backend, Kernel, LinearKernel
from kernels.decoder import AttentionShape, HeadNorms, Norm
from kernels.decoder.kv import token_bytes
from kernels.errors import KernelError
from kernels.formats import NumberFormat

HEAD = "lm_head"  # which no scheme quantizes
_GIB = 1 << 30
RESERVE = 1 << 30  # bytes for graphs, libraries' workspaces and what the allocator rounds up
# Bytes of temporaries a weight while a layer is rounded or packed: FP16, FP32, quotients, codes.
_QUANTIZING_BYTES = 16
_RAW_BYTES = 3  # of a weight of the block that is being loaded: FP16, and its codes
# Of a scale, of a zero point, and of a channel's place in an order.
_SCALE_BYTES, _ZERO_BYTES, _ORDER_BYTES = 2, 1, 4


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the device. weights: packed; cache: keys and values; working: the rest, at most."""

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
    for name, of_layer in formats.items():
        label_of(f"{name} of {model.name}", of_layer)
    block = sum(packed_bytes(n, k, formats[name].weight) for name, n, k in sizes)
    cache = 2 * model.layers * model.kv_heads * capacity * batch
    cache *= token_bytes(architecture.head_dim, kv_bits)
    largest = max(n * k for _, n, k in sizes) * _QUANTIZING_BYTES
    raw_block = sum(n * k for _, n, k in sizes) * _RAW_BYTES
    return Footprint(
        block * model.layers + model.embedding_parameters * 2, cache, largest + raw_block + RESERVE
    )


def check_memory(needed: Footprint, what: str, device: torch.device) -> None:
    """Raise MeasureError with what is needed and what is free, before anything is allocated."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if needed.total > free:
        raise MeasureError(
            f"{what} needs {needed.describe()}, and {free / _GIB:.1f} of {total / _GIB:.1f} GiB "
            "are free: pick a smaller batch, fewer tokens, --kv-bits 8 or another scheme"
        )


def label_of(layer: str, formats: LayerFormats) -> str:
    """Label of the kernel that runs a layer. Raises UsageError if there is none: why."""
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


def linear_kernel(label: str, backend: Backend) -> LinearKernel:
    """The kernel of a linear layer. Raises UsageError if this backend has none of this label."""
    try:
        kernel: Kernel = registry.resolve(label, backend)
    except KernelError as error:
        raise UsageError(str(error)) from error
    if not isinstance(kernel, LinearKernel):
        raise UsageError(f"{label} is no linear layer: see `flexq-bench list kernels`")
    return kernel


def load(
    source: WeightSource,
    device: torch.device,
    length: int,
    choose: ChooseConfig,
    batches: tuple[int, ...],
    on_block: Callable[[int], None] = lambda done: None,
    find: Callable[[str, Backend], LinearKernel] = linear_kernel,
) -> Model:
    """The model, its codes packed as they are. length: tokens that a sequence may have.

    batches: numbers of tokens that steps will have; the configuration of the first decides which
    layout of the weights is kept. on_block: called with the blocks done. find: the kernel of a
    label.

    Raises UsageError for a layer without a kernel.
    """
    architecture = source.architecture
    backend: Backend = "cuda" if device.type == "cuda" else "cpu"
    dimensions = architecture.dimensions

    def pack(name: str, within: str, layer: QuantizedLayer) -> PackedLinear:
        kernel = find(label_of(f"{name} of {within}", layer.formats), backend)
        config = choose(kernel, batches[0], layer.weight.rows, layer.weight.k)
        packed = kernel.narrow(kernel.pack_weight(layer.weight), config)
        return PackedLinear(name, kernel, packed, layer.bias)

    def norm_of(part: Affine) -> Norm:
        return Norm(part.weight, part.bias, architecture.eps)

    blocks, names = [], [name for name, _, _ in layer_sizes(architecture)]
    for index in range(dimensions.layers):
        raw = source.block(index, device)
        within = f"{dimensions.name}, block {index}"
        qkv, out, widen, down = (pack(name, within, raw.linears.pop(name)) for name in names)
        heads = None if raw.head_norms is None else HeadNorms(*raw.head_norms, architecture.eps)
        norms = norm_of(raw.attention_norm), norm_of(raw.ffn_norm)
        blocks.append(Block(*norms, qkv, out, widen, down, heads))
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
        architecture, embedding, ends.positions, tuple(blocks), norm_of(ends.norm), head, attention
    )
    release(device)
    return model


def release(device: torch.device) -> None:
    """Give freed memory back to the driver of a GPU."""
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
    """Bytes of packed weights [N,K] with their scales, but for rows that a kernel pads."""
    if fmt.is_dense:
        return n * k * fmt.bits // 8
    groups = 1 if fmt.group is None else -(-k // fmt.group)
    codes = n * k * fmt.bits // 8
    scales = n * groups * _SCALE_BYTES
    if fmt.kind == "asymmetric":
        return codes + scales + n * groups * _ZERO_BYTES
    if fmt.kind == "dual":
        return codes + scales + n * _SCALE_BYTES  # of groups, and of rows
    if fmt.kind == "mixed" and fmt.group is not None:
        # The last group has twice the bits, as one more group of codes; and an order of channels.
        return codes + scales + n * (fmt.group * fmt.bits // 8 + _SCALE_BYTES) + k * _ORDER_BYTES
    return codes + scales

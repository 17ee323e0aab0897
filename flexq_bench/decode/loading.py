"""From weights to a model on a device, a block at a time, with what it takes said before."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flexq_bench.decode.architecture import Architecture
from flexq_bench.decode.decoder import Block, Model
from flexq_bench.decode.layers import ChooseConfig, PackedLinear
from flexq_bench.decode.weights import Affine, WeightSource, layer_sizes
from flexq_bench.errors import MeasureError, UsageError
from kernels import registry
from kernels.contract import Backend, Kernel, LinearKernel
from kernels.decoder import AttentionShape, Norm
from kernels.decoder.kv import token_bytes
from kernels.errors import KernelError
from kernels.formats import NumberFormat
from workloads.schemes import Scheme

HEAD = "lm_head"
HEAD_KERNEL = "fp16"  # no scheme quantizes the output head
_GIB = 1 << 30
RESERVE = 1 << 30  # bytes for graphs, libraries' workspaces and what the allocator rounds up
# Bytes of temporaries a weight while a layer is quantized: FP16, FP32, quotients, codes.
_QUANTIZING_BYTES = 16
_SCALE_BYTES, _ORDER_BYTES = 2, 4  # of a scale, and of a channel's place in an order


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


def footprint(
    architecture: Architecture,
    scheme: Scheme,
    batch: int,
    capacity: int,
    kv_bits: int,
    backend: Backend,
) -> Footprint:
    """What decoding takes, from the formats alone. Raises UsageError for a kernel it can't have."""
    model = architecture.dimensions
    sizes = layer_sizes(architecture)
    block = sum(
        packed_bytes(
            n, k, linear_kernel(scheme.kernel_of(architecture.block, name), backend).spec.weight
        )
        for name, n, k in sizes
    )
    cache = 2 * model.layers * model.kv_heads * capacity * batch
    cache *= token_bytes(architecture.head_dim, kv_bits)
    largest = max(n * k for _, n, k in sizes) * _QUANTIZING_BYTES
    raw_block = sum(n * k for _, n, k in sizes) * 2
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
    scheme: Scheme,
    device: torch.device,
    length: int,
    choose: ChooseConfig,
    batches: tuple[int, ...],
    on_block: Callable[[int], None] = lambda done: None,
    find: Callable[[str, Backend], LinearKernel] = linear_kernel,
) -> Model:
    """The model under a scheme. length: tokens that a sequence may have.

    batches: numbers of tokens that steps will have; the configuration of the first decides which
    layout of the weights is kept. on_block: called with the blocks done. find: the kernel of a
    label.
    """
    architecture = source.architecture
    backend: Backend = "cuda" if device.type == "cuda" else "cpu"
    dimensions = architecture.dimensions

    def pack(name: str, label: str, part: Affine) -> PackedLinear:
        kernel = find(label, backend)
        n, k = part.weight.shape
        config = choose(kernel, batches[0], n, k)
        packed = kernel.narrow(kernel.pack_weight(kernel.quantize_weight(part.weight)), config)
        return PackedLinear(name, kernel, packed, part.bias)

    def norm_of(part: Affine) -> Norm:
        return Norm(part.weight, part.bias, architecture.eps)

    blocks = []
    for index in range(dimensions.layers):
        raw = source.block(index, device)
        names = [name for name, _, _ in layer_sizes(architecture)]
        linears = []
        for name in names:
            label = scheme.kernel_of(architecture.block, name)
            linears.append(pack(name, label, raw.linears.pop(name)))
        blocks.append(Block(norm_of(raw.attention_norm), norm_of(raw.ffn_norm), *linears))
        on_block(index + 1)
    ends = source.ends(device)
    head = pack(HEAD, HEAD_KERNEL, Affine(ends.head))
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
    """Give freed memory back to the driver."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _is_view(head: PackedLinear, embedding: torch.Tensor) -> bool:
    """Whether a packed head holds the embedding as it is, so that one copy serves both."""
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
    if fmt.kind == "dual":
        return codes + scales + n * _SCALE_BYTES  # of groups, and of rows
    if fmt.kind == "mixed" and fmt.group is not None:
        # The last group has twice the bits, as one more group of codes; and an order of channels.
        return codes + scales + n * (fmt.group * fmt.bits // 8 + _SCALE_BYTES) + k * _ORDER_BYTES
    return codes + scales

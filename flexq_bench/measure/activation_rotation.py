"""Activations that rotate between launches, and are rewritten in place between samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.inputs import (
    LinearInputs,
    derive_seed,
    quantized_activation,
    realistic_activations,
)
from flexq_bench.measure.protocol import Protocol
from flexq_bench.workloads.case import Case

_ALIGNMENT = 512  # bytes, as the CUDA allocator aligns
# of activations to draw from, if that is enough for the minimum number
_MAX_CONTENT_BYTES = 32 << 20
_MIN_CONTENTS = 3
# Elements with a known float64 result: this many tokens and output features.
_CHECKED_ROWS = 16
_CHECKED_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Parameters of the changes between samples.

    secret: seed of all changes. l2_bytes: L2 size of the device. distinct: True if each copy of the
    weights has a content of its own. A kernel that recognizes contents could otherwise multiply by
    private copies of them, which are fewer than the copies and stay in the cache.
    """

    secret: int
    protocol: Protocol
    l2_bytes: int
    distinct: bool

    def weight_contents(self, copies: int) -> int:
        """Number of contents that so many copies of the weights have in turn."""
        return copies + 1 if self.distinct else 2

    def pool_bytes(self, case: Case, copy_bytes: int) -> int:
        """Bytes of activations over which launches of a sample may rotate.

        A small part of the L2, where a layer finds its input; in hot mode a small part of the rest
        that the weights leave.
        """
        most = int(self.protocol.pool_share * self.l2_bytes)
        if case.cache == "hot":
            most = min(most, max(0, self.l2_bytes - copy_bytes) // 4)
        return most


class Slots:
    """Operands of one layout, contiguous in memory, so that one copy rewrites many of them."""

    def __init__(self, like: PackedOperand, count: int) -> None:
        self._layout = like.clone()  # without the padding between the rows of a view
        device = next(iter(self._layout.buffers.values())).device
        self._bytes = torch.empty(count, Slots.bytes_each(like), dtype=torch.uint8, device=device)
        self._operands: dict[int, PackedOperand] = {}

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, i: int) -> PackedOperand:
        """Operand i; writing to it changes the slot."""
        if i not in self._operands:
            start, buffers = 0, {}
            for name, buffer in self._layout.buffers.items():
                size = _extent_bytes(buffer)
                part = self._bytes[i, start : start + size].view(buffer.dtype)
                buffers[name] = part.as_strided(buffer.shape, buffer.stride())
                start += _aligned(size)
            self._operands[i] = PackedOperand(buffers, self._layout.rows, self._layout.k)
        return self._operands[i]

    def copy_from(self, other: Slots, first: int, count: int) -> None:
        """Fill the first `count` slots with those of `other` from `first` on."""
        self._bytes[:count].copy_(other._bytes[first : first + count])

    def fill(self, operands: Sequence[PackedOperand]) -> None:
        """Fill all slots cyclically with operands of the same layout; there may not be more
        operands.
        """
        count = len(operands)
        for i, operand in enumerate(operands):
            self[i].copy_from(operand)
        for start in range(count, len(self), count):
            part = self._bytes[start : start + count]
            part.copy_(self._bytes[: len(part)])

    @staticmethod
    def bytes_each(like: PackedOperand) -> int:
        """Bytes of an operand of this layout here."""
        return sum(_aligned(_extent_bytes(buffer.clone())) for buffer in like.buffers.values())


@dataclass(frozen=True, slots=True)
class Contents:
    """Activations to draw from, and the elements of their results that are checked.

    inputs: as the stage takes them; the first is the subject's own. unseen: in no sample. rows,
    columns: int64, of the checked elements. x_rows: these rows of the inputs and of the unseen.
    """

    inputs: Sequence[PackedOperand]
    unseen: PackedOperand
    rows: torch.Tensor
    columns: torch.Tensor
    x_rows: Sequence[Operand]
    rounds_to: int | None

    def reference(self, weights: Sequence[Operand], activations: Sequence[int]) -> Reference:
        """The checked elements of the results of launches.

        weights, activations: of each launch, W [N,K] and the index of the input. y and magnitude,
        the sum of all |products|, are [launches, rows, columns].
        """
        launches: dict[int, list[int]] = defaultdict(list)
        for i, w in enumerate(weights):
            launches[id(w)].append(i)
        count, rows, columns = len(weights), len(self.rows), len(self.columns)
        y = torch.empty(
            count, rows, columns, dtype=torch.float64, device=self.x_rows[0].values.device
        )
        magnitude = torch.empty_like(y)
        for indices in launches.values():
            used = sorted({activations[i] for i in indices})
            # A stale result differs by far. Rounding errors (of sums of single bit planes, for
            # example, which cancel if their total is small) are tolerated relative to all products
            # here; the announced checks judge rounding.
            exact = reference_gemm(
                Operand.stacked([self.x_rows[i] for i in used]),
                weights[indices[0]].take_rows(self.columns),
                integer_sums=False,
            )
            places = [used.index(activations[i]) for i in indices]
            y[indices] = exact.y.view(len(used), rows, columns)[places]
            magnitude[indices] = exact.magnitude.view(len(used), rows, columns)[places]
        return replace(exact, y=y, magnitude=magnitude).rounded_to(self.rounds_to)


def stage_input(bound: BoundKernel, inputs: LinearInputs) -> PackedOperand:
    """Return the input of a launch in the case's stage: packed codes, or `real` FP16 activations.

    The kernel's code gets a copy of the codes, so that it can't change what its reference is
    computed from. Raises ValueError if the stage needs real activations and the inputs have none.
    """
    if bound.case.stage == "gemm":
        return bound.kernel.pack_activation(inputs.x.clone())
    if inputs.x_real is None:
        raise ValueError("the linear stage needs real activations, these inputs are codes")
    return PackedOperand({"real": inputs.x_real}, bound.gemm.m, bound.gemm.k)


def draw_contents(
    bound: BoundKernel, own: LinearInputs, rewriting: Rewriting, seed: int
) -> Contents:
    """Draw activations like the subject's own, and elements of their results to check."""
    gemm, device = bound.gemm, own.w.values.device
    host = torch.Generator().manual_seed(seed)
    rows = torch.randperm(gemm.m, generator=host, device="cpu")[:_CHECKED_ROWS].to(device)
    columns = torch.randperm(gemm.n, generator=host, device="cpu")[:_CHECKED_COLUMNS].to(device)
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "activations"))
    inputs: list[PackedOperand] = []
    x_rows: list[Operand] = []

    def add(x: LinearInputs) -> None:
        x_rows.append(x.x.take_rows(rows))  # first, because packing runs the kernel's code
        inputs.append(stage_input(bound, x))

    add(own)
    fitting = _MAX_CONTENT_BYTES // Slots.bytes_each(inputs[0])
    count = max(_MIN_CONTENTS, min(rewriting.protocol.contents, fitting))
    while len(inputs) <= count:  # one more, which is unseen
        x_real = realistic_activations(gemm, generator)
        add(LinearInputs(x_real, quantized_activation(bound.kernel, x_real), own.w))
    return Contents(inputs[:-1], inputs[-1], rows, columns, x_rows, bound.spec.rounds_to)


def _extent_bytes(buffer: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if buffer.numel() == 0:
        return 0
    steps = zip(buffer.shape, buffer.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * buffer.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

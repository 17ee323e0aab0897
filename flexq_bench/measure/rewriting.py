"""Operands that are rewritten in place between samples, so that no launch knows its result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch

from flexq_bench.measure.inputs import LinearInputs, derive_seed, realistic_activations
from flexq_bench.measure.protocol import Protocol
from kernels.contract import LinearKernel, PackedOperand
from kernels.formats import Operand
from kernels.reference import Reference, reference_gemm
from workloads.case import Case

_ALIGNED = 512  # bytes, as the CUDA allocator aligns
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MOVED = 8  # one of this many rows of the weights differs in their second content
# of activations to draw from, if that is enough for the minimum number
_MAX_CONTENT_BYTES = 32 << 20
_MIN_CONTENTS = 3
# Elements with a known float64 result: this many tokens and output features.
_LOOKED_AT_ROWS = 16
_LOOKED_AT_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Parameters of the changes between samples.

    secret: seed of all changes. l2_bytes: L2 size of the device.
    """

    secret: int
    protocol: Protocol
    l2_bytes: int

    def pool_bytes(self, case: Case, copy_bytes: int) -> int:
        """Bytes of activations over which launches of a sample may rotate.

        A small part of the L2, where a layer finds its input; in hot mode a small part of the rest
        that the weights leave.
        """
        most = int(self.protocol.pool_share * self.l2_bytes)
        if case.cache == "hot":
            most = min(most, max(0, self.l2_bytes - copy_bytes) // 4)
        return most


def second_order(rows: int, seed: int) -> torch.Tensor:
    """An order of rows, int64 [rows], in which a random eighth of them are permuted.

    It gives a second content of the weights whose reference needs no second GEMM, and which cannot
    be recognized by a few words.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.arange(rows, device="cpu")
    moved = torch.randperm(rows, generator=generator, device="cpu")[: max(2, rows // _MOVED)]
    order[moved] = moved.roll(1)
    return order


class WeightCopies(Sequence[PackedOperand]):
    """Copies of packed weights at fresh addresses, each with one of several contents.

    contents: packed, of one layout. held: the current content of each copy.
    """

    def __init__(self, contents: Sequence[PackedOperand], copies: int, draw: random.Random) -> None:
        self._contents = contents
        self.held = [draw.randrange(len(contents)) for _ in range(copies)]
        self._copies = [contents[content].clone() for content in self.held]

    def __len__(self) -> int:
        return len(self._copies)

    @overload
    def __getitem__(self, i: int) -> PackedOperand: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PackedOperand]: ...
    def __getitem__(self, i: int | slice) -> PackedOperand | Sequence[PackedOperand]:
        return self._copies[i]

    def rewrite(self, copy: int) -> None:
        """Give a copy its next content, in place."""
        self.held[copy] = (self.held[copy] + 1) % len(self._contents)
        self._copies[copy].copy_from(self._contents[self.held[copy]])

    def changed(self, copy: int) -> str | None:
        """The first buffer of a copy that differs from its content; None: none does."""
        return first_change(self._copies[copy], self._contents[self.held[copy]])

    def have(self, contents: Sequence[PackedOperand]) -> bool:
        """Return True if the copies have these contents: the same bytes, layout and order."""
        return len(contents) == len(self._contents) and all(
            mine.buffers.keys() == theirs.buffers.keys()
            and all(
                buffer.dtype == theirs.buffers[name].dtype
                and torch.equal(buffer, theirs.buffers[name])
                for name, buffer in mine.buffers.items()
            )
            for mine, theirs in zip(self._contents, contents, strict=True)
        )


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
    """Activations to draw from, and the checked elements of their results.

    inputs: as the stage takes them; the first is the subject's own. unseen: in no sample. rows,
    columns: int64, of the checked elements. reference: y and magnitude, the sum of all |products|,
    are [contents of the weights, inputs and then unseen, rows, columns].
    """

    inputs: Sequence[PackedOperand]
    unseen: PackedOperand
    rows: torch.Tensor
    columns: torch.Tensor
    reference: Reference


def first_change(now: PackedOperand, filled: PackedOperand) -> str | None:
    """The first buffer whose bits differ from its original contents; None: none does."""
    for name, buffer in filled.buffers.items():
        if not torch.equal(_bits(now.buffers[name]), _bits(buffer)):
            return name
    return None


def stage_input(kernel: LinearKernel, case: Case, inputs: LinearInputs) -> PackedOperand:
    """Return the input of a launch in the case's stage: packed codes, or `real` FP16 activations.

    Raises ValueError if the stage needs real activations and the inputs have none.
    """
    if case.stage == "gemm":
        return kernel.pack_activation(inputs.x)
    if inputs.x_real is None:
        raise ValueError("the linear stage needs real activations, these inputs are codes")
    return PackedOperand({"real": inputs.x_real}, case.gemm.m, case.gemm.k)


def draw_contents(
    kernel: LinearKernel,
    case: Case,
    own: LinearInputs,
    orders: Sequence[torch.Tensor],
    rewriting: Rewriting,
    seed: int,
) -> Contents:
    """Draw activations like the subject's own, and elements of their results to check.

    orders: of the rows of `own.w`, one for each content of the weights.
    """
    gemm, device = case.gemm, own.w.values.device
    first = stage_input(kernel, case, own)
    fitting = _MAX_CONTENT_BYTES // Slots.bytes_each(first)
    count = max(_MIN_CONTENTS, min(rewriting.protocol.contents, fitting))
    host = torch.Generator().manual_seed(seed)
    rows = torch.randperm(gemm.m, generator=host, device="cpu")[:_LOOKED_AT_ROWS]
    columns = _columns(orders, gemm.n, host)
    generator = torch.Generator(device).manual_seed(derive_seed(seed, "activations"))
    inputs, xs = [first], [own.x.take_rows(rows.to(device))]
    while len(inputs) <= count:  # one more, which is unseen
        x_real = realistic_activations(gemm, generator)
        quantized = kernel.quantize_activation(x_real)
        inputs.append(stage_input(kernel, case, LinearInputs(x_real, quantized, own.w)))
        xs.append(quantized.take_rows(rows.to(device)))
    w_rows = torch.cat([order[columns] for order in orders]).to(device)
    x, w = Operand.stacked(xs), own.w.take_rows(w_rows)
    # A stale result differs by far. Rounding errors (of sums of single bit planes, for example,
    # which cancel if their total is small) are tolerated relative to all products here; the
    # announced checks judge rounding.
    exact = reference_gemm(x, w, integer_sums=False).rounded_to(kernel.spec.rounds_to)

    def by_content(values: torch.Tensor) -> torch.Tensor:
        shaped = values.view(len(inputs), len(rows), len(orders), len(columns))
        return shaped.permute(2, 0, 1, 3).contiguous()

    reference = replace(exact, y=by_content(exact.y), magnitude=by_content(exact.magnitude))
    return Contents(inputs[:-1], inputs[-1], rows.to(device), columns.to(device), reference)


def _columns(orders: Sequence[torch.Tensor], n: int, generator: torch.Generator) -> torch.Tensor:
    """Output features to check: half of them differ between contents of the weights."""
    shuffled = torch.randperm(n, generator=generator, device="cpu")
    differs = (orders[0] != orders[-1])[shuffled]
    moved, unmoved = shuffled[differs], shuffled[~differs]
    half = _LOOKED_AT_COLUMNS // 2
    return torch.cat([moved[:half], unmoved[: _LOOKED_AT_COLUMNS - min(half, len(moved))]])


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """View a buffer as integers, each of which equals itself even if it is a NaN."""
    kind = _INTEGERS.get(buffer.element_size())
    return buffer if kind is None else buffer.view(kind)


def _extent_bytes(buffer: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if buffer.numel() == 0:
        return 0
    steps = zip(buffer.shape, buffer.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * buffer.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

"""Activations that rotate between launches, and are rewritten in place between samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.measure.protocol import Protocol
from flexq_bench.measure.weight_rotation import first_change
from flexq_bench.workloads.case import CacheMode

_ALIGNMENT = 512  # bytes, as the CUDA allocator aligns
# of activations to draw from, if that is enough for the minimum number
_MAX_CONTENT_BYTES = 32 << 20
_MIN_CONTENTS = 3
_MIN_SLOTS, _MAX_SLOTS = 2, 256
_MAX_COLD_SLOTS = 8  # of activations; a cold sample makes few passes over the weights


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

    def activation_contents(self, like: PackedOperand) -> int:
        """Number of activations like this one to draw from, without one that is in no sample."""
        fitting = _MAX_CONTENT_BYTES // Slots.bytes_each(like)
        return max(_MIN_CONTENTS, min(self.protocol.contents, fitting))

    def pool_bytes(self, cache: CacheMode, copy_bytes: int) -> int:
        """Bytes of activations over which launches of a sample may rotate.

        A small part of the L2, where a layer finds its input; in hot mode a small part of the rest
        that the weights leave.
        """
        most = int(self.protocol.pool_share * self.l2_bytes)
        if cache == "hot":
            most = min(most, max(0, self.l2_bytes - copy_bytes) // 4)
        return most


class Slots:
    """Operands of one layout, contiguous in memory, so that one copy rewrites many of them."""

    def __init__(self, like: PackedOperand, count: int) -> None:
        self._layout = like.clone()  # without the padding between the rows of a view
        device = next((buffer.device for buffer in self._layout.buffers.values()), None)
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
        """Bytes of an operand of this layout here; 1 for one without buffers."""
        return max(
            1, sum(_aligned(_extent_bytes(buffer.clone())) for buffer in like.buffers.values())
        )


class Activations:
    """Slots that launches read, filled from a bank of contents before each sample.

    inputs: the contents, in the layout of launches. copies: of the weights. budget: most bytes of
    the slots, if they are more than the minimum.
    """

    def __init__(self, inputs: Sequence[PackedOperand], *, copies: int, budget: int) -> None:
        most = _MAX_SLOTS if copies == 1 else _MAX_COLD_SLOTS
        count = max(_MIN_SLOTS, min(most, budget // Slots.bytes_each(inputs[0])))
        self.slots = Slots(inputs[0], count)
        self.contents = len(inputs)
        # Long enough that one copy fills the slots, starting at any content.
        self.bank = Slots(inputs[0], len(inputs) + count)
        self.bank.fill(inputs)
        self.slots.copy_from(self.bank, 0, count)
        self._first = 0  # content of the first slot
        self._copies = copies
        self._used = count
        # So many slots have these contents, from the first on.
        self._filled = self.bank, 0, count

    def use(self, launches: int) -> None:
        """Use as few slots as samples of so many launches need."""
        self._used = min(len(self.slots), -(-launches // self._copies))

    def slot(self, position: int) -> int:
        """The slot of a launch of a sample: the launches of a pass over the weights share one."""
        return position // self._copies % self._used

    def content(self, slot: int) -> int:
        """The index of the content that a slot has since `rewrite`."""
        return (self._first + slot) % self.contents

    def rewrite(self, draw: random.Random) -> None:
        """Give all slots other contents."""
        self._first = (self._first + draw.randrange(1, self.contents)) % self.contents
        self._fill(self.bank, self._first, self._used)

    def give(self, slots: Slots) -> None:
        """Give the used slots these contents."""
        self._fill(slots, 0, self._used)

    def give_first(self) -> None:
        """Give all slots the first content."""
        self._fill(self.everywhere(self.bank[0]), 0, len(self.slots))

    def everywhere(self, x: PackedOperand) -> Slots:
        """Slots that all have this content."""
        slots = Slots(x, len(self.slots))
        slots.fill([x])
        return slots

    def restore(self) -> None:
        """Give the slots again what was filled into them last."""
        self.slots.copy_from(*self._filled)

    def changed(self) -> str | None:
        """The first buffer of a slot that differs from its content; None: none does."""
        bank, first, count = self._filled
        changes = (first_change(self.slots[i], bank[first + i]) for i in range(count))
        return next(filter(None, changes), None)

    def _fill(self, bank: Slots, first: int, count: int) -> None:
        self._filled = bank, first, count
        self.restore()


def _extent_bytes(buffer: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to its last."""
    if buffer.numel() == 0:
        return 0
    steps = zip(buffer.shape, buffer.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * buffer.element_size()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

"""Weights that rotate between launches: copies, larger together than the L2, and rewritten.

Launches of a cold sample read copy after copy, so that each was evicted before it is read again.
Copies are rewritten in place between samples, so that no launch knows its result. Cases of one
kernel share the weights of a layer, which are quantized and packed once.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.measure.protocol import Protocol
from flexq_bench.workloads.case import CacheMode

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def copies_for(
    cache: CacheMode,
    copy_bytes: int,
    l2_bytes: int | None,
    protocol: Protocol,
    *,
    read_bytes: int | None = None,
) -> int:
    """Number of copies of `copy_bytes` bytes each to rotate over.

    read_bytes: of each, which launches must read at least; None: all. cold: together the copies
    exceed cache_factor times the L2, so that each is evicted before it is read again. Small
    weights, which would need very many copies, exceed min_cache_factor times, and so do the bytes
    that are read. hot: one copy, which must fit the L2. A kernel that reads no weights (0 bytes)
    has one. Raises UnsupportedError if weights are too small for cold or too large for hot.
    """
    if copy_bytes == 0:
        return 1
    if cache == "hot":
        if l2_bytes is not None and copy_bytes > l2_bytes:
            raise UnsupportedError(
                f"{copy_bytes:,} bytes of weights do not fit the L2 of {l2_bytes:,} bytes, "
                "so they are never hot: measure this shape cold"
            )
        return 1
    least_bytes = copy_bytes if read_bytes is None else min(copy_bytes, read_bytes)
    needed = protocol.cold_bytes(l2_bytes, protocol.min_cache_factor) // least_bytes + 1
    preferred = protocol.cold_bytes(l2_bytes, protocol.cache_factor) // copy_bytes + 1
    copies = max(needed, min(preferred, protocol.many_copies))
    if copies > protocol.max_launches:
        raise UnsupportedError(
            f"{least_bytes:,} bytes of streamed inputs would need {copies:,} copies to be cold and "
            f"{protocol.max_launches:,} is the most: measure this shape hot, or a larger one; an "
            "operation of your own can declare small weights as activations"
        )
    return copies


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """One content of the weights: as the reference takes them, and packed in a kernel's layout.

    operand: of a linear layer [N,K]; of other operations, the streamed inputs by name. given: how
    many were given in this placement before; None: it is not given, but drawn here.
    """

    operand: Any
    packed: PackedOperand
    given: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        is_named = isinstance(self.operand, Mapping)
        parts = self.operand.values() if is_named else [self.operand]
        return self.packed.nbytes + sum(int(part.nbytes) for part in parts)


class LayerWeights:
    """Contents of the weights of a layer, independent of each other, drawn when they are needed.

    draw: returns the content of an index.
    """

    def __init__(self, draw: Callable[[int], Content]) -> None:
        self._draw = draw
        self._drawn: list[Content] = []

    def first(self, count: int) -> Sequence[Content]:
        """The first `count` contents."""
        while len(self._drawn) < count:
            self._drawn.append(self._draw(len(self._drawn)))
        return self._drawn[:count]

    def repacked(self, packing: Callable[[PackedOperand], PackedOperand]) -> LayerWeights:
        """The same contents in another layout, which is made of this one."""

        def draw(index: int) -> Content:
            content = self.first(index + 1)[index]
            return replace(content, packed=packing(content.packed))

        return LayerWeights(draw)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(content.nbytes for content in self._drawn)


class SharedWeights:
    """Weights of recently measured layers, as long as they fit.

    most_bytes: limit of their size. The least recently used ones are evicted.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, LayerWeights] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], LayerWeights]) -> LayerWeights:
        """The weights of this key, created if they are not cached."""
        weights = self._kept.pop(key, None)
        if weights is None:
            weights = make()
        self._kept[key] = weights
        while len(self._kept) > 1 and self.nbytes > self._most_bytes:
            self._kept.popitem(last=False)
        if self.nbytes > self._most_bytes:
            self.clear()
        return weights

    @property
    def nbytes(self) -> int:
        return sum(weights.nbytes for weights in self._kept.values())

    def clear(self) -> None:
        """Evict all."""
        self._kept.clear()


class WeightCopies(Sequence[PackedOperand]):
    """Copies of packed weights at fresh addresses, each with one of several contents.

    With more contents than copies, no two copies ever have the same one. Otherwise contents are
    drawn. contents: all of them. current: that of each copy.
    """

    def __init__(self, contents: Sequence[Content], copies: int, draw: random.Random) -> None:
        self._deal(contents, copies, draw)
        self._copies = [content.packed.clone() for content in self.current]

    def _deal(self, contents: Sequence[Content], copies: int, draw: random.Random) -> None:
        self.contents = contents
        dealt = [i % len(contents) for i in range(max(len(contents), copies + 1))]
        draw.shuffle(dealt)
        self.current = [contents[i] for i in dealt[:copies]]
        self._spare = contents[dealt[copies]]

    def deal_again(self, contents: Sequence[Content], draw: random.Random) -> None:
        """Give all copies contents of the same layout, as if they were new."""
        self._deal(contents, len(self), draw)
        for copy, content in enumerate(self.current):
            self.set_content(copy, content)

    def __len__(self) -> int:
        return len(self._copies)

    @overload
    def __getitem__(self, i: int) -> PackedOperand: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[PackedOperand]: ...
    def __getitem__(self, i: int | slice) -> PackedOperand | Sequence[PackedOperand]:
        return self._copies[i]

    def rewrite(self, copy: int) -> None:
        """Give a copy another content, in place: the one that was free, if it differs."""
        old = self.current[copy]
        new = self._spare if self._spare is not old else self._after(old)
        self.set_content(copy, new)
        self._spare = old

    def set_content(self, copy: int, content: Content) -> None:
        """Give a copy this content, in place."""
        self.current[copy] = content
        self._copies[copy].copy_from(content.packed)

    def restore(self, copies: Collection[int], names: Collection[str]) -> None:
        """Give these buffers of these copies their contents again."""
        places = [(copy, name) for copy in sorted(copies) for name in names]
        if places:
            torch._foreach_copy_(
                [self._copies[copy].buffers[name] for copy, name in places],
                [self.current[copy].packed.buffers[name] for copy, name in places],
            )

    def changed(self, copy: int, updated: Collection[str] = ()) -> str | None:
        """The first buffer of a copy but `updated` that differs from its content; None: none."""
        return first_change(self._copies[copy], self.current[copy].packed, updated)

    def have(self, contents: Sequence[Content]) -> bool:
        """Return True if the copies have these contents: the same bytes, layout and order."""
        return len(contents) == len(self.contents) and all(
            mine.packed.buffers.keys() == theirs.packed.buffers.keys()
            and all(
                buffer.dtype == theirs.packed.buffers[name].dtype
                and torch.equal(buffer, theirs.packed.buffers[name])
                for name, buffer in mine.packed.buffers.items()
            )
            for mine, theirs in zip(self.contents, contents, strict=True)
        )

    def index_of(self, content: Content) -> int:
        """The index of a content; of given ones -1 and less, in their order."""
        if content.given is not None:
            return -1 - content.given
        return next(i for i, known in enumerate(self.contents) if known is content)

    def _after(self, content: Content) -> Content:
        return self.contents[(self.index_of(content) + 1) % len(self.contents)]


def first_change(
    now: PackedOperand, filled: PackedOperand, updated: Collection[str] = ()
) -> str | None:
    """The first buffer but `updated` whose bits differ from its contents; None: none does."""
    for name, buffer in filled.buffers.items():
        if name not in updated and not torch.equal(_bits(now.buffers[name]), _bits(buffer)):
            return name
    return None


def _bits(buffer: torch.Tensor) -> torch.Tensor:
    """View a buffer as integers, each of which equals itself even if it is a NaN."""
    kind = _INTEGERS.get(buffer.element_size())
    return buffer if kind is None else buffer.view(kind)

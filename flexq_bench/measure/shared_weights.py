"""Weights of a layer that cases of one kernel share, quantized and packed once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from flexq_bench.kernels.contract import PackedOperand
from flexq_bench.kernels.formats import Operand


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """One content of the weights [N,K] of a layer: as codes, and packed in a kernel's layout."""

    operand: Operand
    packed: PackedOperand

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.operand.values, self.operand.scales)
        own = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return own + self.packed.nbytes


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

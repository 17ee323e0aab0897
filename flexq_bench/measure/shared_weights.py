"""Weights of a layer that cases of one kernel share, quantized and packed once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from kernels.contract import PackedOperand
from kernels.formats import Operand


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights [N,K] and their second content, in which some rows are permuted.

    operand: of the first content. orders: of the operand's rows, int64 [N], one per content;
    packed: in the kernel's layout, one per content.
    """

    operand: Operand
    orders: tuple[torch.Tensor, ...]
    packed: tuple[PackedOperand, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tensors = (self.operand.values, self.operand.scales)
        own = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        return own + sum(packed.nbytes for packed in self.packed)


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

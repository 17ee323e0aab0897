"""Outputs that are looked at unannounced: which launches, which samples, and what they computed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexq_bench.measure.clocks import draw_kept
from flexq_bench.measure.weight_rotation import Content
from flexq_bench.measure.work import KeptLaunches, Outputs

_KEPT_SAMPLES = 16  # samples of a placement whose outputs are kept, at most
_KEPT_LAUNCHES = 16  # of such a sample


@dataclass(frozen=True, slots=True)
class _Sample:
    """Inputs of the launches of a sample whose outputs are kept."""

    activations: tuple[int, ...]
    weights: tuple[Content, ...]


class KeptOutputs:
    """Elements of outputs, copied after randomly drawn launches of untimed samples.

    elements: flat indices of each output. like: the outputs. draw: from a secret.
    """

    def __init__(self, elements: Outputs, like: Outputs, draw: random.Random) -> None:
        self._elements, self._draw = elements, draw
        sizes = {name: (_KEPT_LAUNCHES, len(indices)) for name, indices in elements.items()}
        self._copied = {name: _empty_like(like[name], size) for name, size in sizes.items()}
        self._kept = {
            name: _empty_like(like[name], (_KEPT_SAMPLES, *size)) for name, size in sizes.items()
        }
        self._samples: list[_Sample] = []
        self._seen = 0
        # Slot of X, and copy of W, of launches whose outputs are copied
        self.launches: list[tuple[int, int]] = []
        self._positions: Sequence[int] = ()
        self._before: Counter[int] = Counter()
        self._to_keep: int | None = None  # samples of the next batch; None: their number is drawn

    def begin_launches(self, count: int) -> None:
        """Draw the launches of a sample of so many whose outputs are copied."""
        self._positions = self._draw.sample(range(count), min(count, _KEPT_LAUNCHES))

    def after_launch(self, position: int, outputs: Outputs, slot: int, copy: int) -> None:
        """Copy the outputs of a launch if it is one of those drawn."""
        if position == 0:
            self.launches.clear()
        if position not in self._positions:
            return
        for name, indices in self._elements.items():
            values = _indexable(outputs[name].reshape(-1))
            kept = _indexable(self._copied[name][len(self.launches)])
            torch.index_select(values, 0, indices, out=kept)
        self.launches.append((slot, copy))

    def keep_samples(self, count: int) -> None:
        """Keep so many samples in the next batch."""
        self._to_keep = count

    def begin_batch(self, count: int) -> None:
        """Draw where among the timed samples of a batch the kept ones are."""
        kept = draw_kept(self._draw) if self._to_keep is None else self._to_keep
        self._to_keep = None
        # Kept and timed samples are in any order that ends with a timed one.
        places = sorted(self._draw.sample(range(kept + count - 1), kept))
        self._before = Counter(place - before for before, place in enumerate(places))

    def before(self, index: int) -> int:
        """Number of kept samples before a timed one of the batch."""
        return self._before[index]

    def after_sample(self, content: Callable[[int], int], weights: Sequence[Content]) -> None:
        """Keep the sample's outputs, or those of others instead.

        content: index of a slot's activations. weights: of each copy.
        """
        # Reservoir sampling: every such sample of the placement is kept with equal probability.
        place = len(self._samples)
        if place == _KEPT_SAMPLES:
            place = self._draw.randrange(self._seen + 1)
        self._seen += 1
        if place >= _KEPT_SAMPLES:
            return
        sample = _Sample(
            tuple(content(slot) for slot, _ in self.launches),
            tuple(weights[copy] for _, copy in self.launches),
        )
        self._samples[place : place + 1] = [sample]
        for name, copied in self._copied.items():
            self._kept[name][place].copy_(copied)

    def all(self) -> KeptLaunches | None:
        """The kept launches; None: there are none."""
        if not self._samples:
            return None
        outputs = {
            name: torch.cat([kept[i, : len(s.weights)] for i, s in enumerate(self._samples)])
            for name, kept in self._kept.items()
        }
        return KeptLaunches(
            outputs,
            [w for sample in self._samples for w in sample.weights],
            [content for sample in self._samples for content in sample.activations],
        )


def _empty_like(output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=output.dtype, device=output.device)


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """View FP8 as bytes, which torch can index."""
    is_fp8 = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.view(torch.uint8) if is_fp8 else tensor

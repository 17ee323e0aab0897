"""Launches of a case, and the judging of their results, for any operation."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexq_bench.kernels.contract import Config, PackedOperand
from flexq_bench.measure.weight_rotation import Content

WRONG_UNANNOUNCED = "launches are wrong on inputs that change in place between samples"
Outputs = Mapping[str, torch.Tensor]  # by name; an operation of one output calls it "out"


@dataclass(frozen=True, slots=True)
class KeptLaunches:
    """Launches whose outputs were looked at, with the contents that they had.

    outputs: elements [launches, elements] of each output. activations: indices of Work.inputs, and
    their number for the unseen ones.
    """

    outputs: Outputs
    weights: Sequence[Content]
    activations: Sequence[int]

    def chosen(self, places: Sequence[int]) -> KeptLaunches:
        """Some of the launches."""
        at = list(places)
        return KeptLaunches(
            {name: values[at] for name, values in self.outputs.items()},
            [self.weights[i] for i in at],
            [self.activations[i] for i in at],
        )


class Work(ABC):
    """The launches of a case on one placement.

    A launch reads streamed inputs ("w": weights, caches), of which there are several copies, and
    fresh ones ("x": activations, indices), which change from sample to sample. inputs: contents of
    the fresh ones; the first is the subject's own. unseen: one that is in no sample. elements: of
    each output, the flat indices whose values are looked at unannounced. read_only: of "x" and "w",
    what launches must not change. fixed: buffers of "x" whose elements depend on each other.
    exchanged: buffers of "w" that a launch need not have seen before, as those of "x".
    updated: buffers of "w" that launches change, and the outputs that are read there.
    """

    inputs: Sequence[PackedOperand]
    unseen: PackedOperand
    elements: Outputs
    read_only: frozenset[str]
    fixed: frozenset[str] = frozenset()
    exchanged: frozenset[str] = frozenset()
    updated: frozenset[str] = frozenset()

    @abstractmethod
    def allocate(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Allocate the outputs, filled with noise, which is no correct result."""

    @abstractmethod
    def launch(
        self, x: PackedOperand, w: PackedOperand, out: Outputs, config: Config | None
    ) -> Outputs | None:
        """Launch once. Returns the outputs that the kernel allocated itself; None: it wrote `out`.

        They are read where the kernel left them: no copy is timed.
        """

    @abstractmethod
    def judge(self, outputs: Outputs, tolerance: float) -> str:
        """Describe errors of whole outputs, of the first contents; empty: none."""

    @abstractmethod
    def judge_kept(
        self, kept: KeptLaunches, draw: random.Random, tolerance: float
    ) -> tuple[str, int]:
        """Describe errors of the elements looked at, of some launches drawn; empty: none.

        Also returns which launch is wrong; without errors, any.
        """

    @abstractmethod
    def stage(self, inputs: Any) -> PackedOperand:
        """The fresh inputs of a launch in the kernel's layout."""

    @abstractmethod
    def content(self, inputs: Any, config: Config | None) -> Content:
        """The streamed inputs as a content that a copy can take."""

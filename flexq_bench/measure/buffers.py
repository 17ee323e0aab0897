"""One placement: all buffers of a launch, at fresh addresses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from flexq_bench.kernels.contract import Config, PackedOperand
from flexq_bench.measure.clocks import BetweenSamples
from flexq_bench.measure.inputs import LinearInputs

# Activations of launches: those of the timed samples, ones that no launch has seen, or no others.
Draw = Literal["timed", "new", "same"]

_PAD_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}


class UnseenInputs(ABC):
    """Activations of the next launches, one operand each.

    launches: number of launches with operands of their own.
    """

    launches: int

    @abstractmethod
    def draw(self, draw: Draw) -> None:
        """Write activations, and start again with the first launch.

        Where launches keep the same ones, others are written elsewhere, which takes as long.
        """

    @abstractmethod
    def draw_known(self, launches: int) -> None:
        """Give the last of so many launches other unseen activations, whose result is known."""

    @abstractmethod
    def wrong(self, tolerance: float) -> str:
        """Describe errors of the latest launch, which had these activations; empty: none."""


class Buffers(ABC):
    """Copies of the weights at fresh addresses, and the other buffers of a launch."""

    weights: Sequence[PackedOperand]

    @property
    def copies(self) -> int:
        return len(self.weights)

    @property
    @abstractmethod
    def between(self) -> BetweenSamples:
        """The hooks that run between samples."""

    @abstractmethod
    def launch(self, i: int, config: Config | None) -> None:
        """Launch once on copy i."""

    def bound(self, config: Config | None) -> Callable[[int], None]:
        """`launch` with the configuration bound."""
        return lambda i: self.launch(i, config)

    @abstractmethod
    def poison(self) -> None:
        """Fill the output with values that no correct launch produces, for one sample."""

    @abstractmethod
    def inspect(self, config: Config | None, tolerance: float) -> str:
        """Describe errors of outputs; empty: none.

        The outputs are those of the launches since `poison`, and those of unannounced samples.
        """

    @contextmanager
    def unseen_inputs(self) -> Iterator[UnseenInputs | None]:
        """Give each of a few launches new activations within this context; None: not possible."""
        yield None

    def fill(self, inputs: LinearInputs, config: Config | None, *, weights: bool) -> None:
        """Use these activations in the last sample of each batch from now on.

        weights: also write the weights into the copy that the last launch of a sample reads. All
        other launches keep their inputs, so that no launch repeats the work of another one. Raises
        ValueError if these buffers have no inputs.
        """
        raise ValueError("these buffers have no inputs that can be given")

    def output(self) -> torch.Tensor:
        """FP16 [M,N], as the latest launch left it. Raises ValueError if there is none."""
        raise ValueError("these buffers have no output")


def random_pad(device: torch.device, seed: int) -> torch.Tensor:
    """A block of random size, which shifts the addresses of later allocations."""
    generator = torch.Generator().manual_seed(seed)
    most = _PAD_BYTES[device.type]
    size = int(torch.randint(1, most, (), generator=generator, device="cpu"))
    return torch.empty(size, dtype=torch.uint8, device=device)

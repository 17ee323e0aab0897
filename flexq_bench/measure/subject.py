"""Subject of a measurement: a kernel bound to a shape, whose buffers can be placed repeatedly."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, PackedOperand
from flexq_bench.kernels.errors import KernelError
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.buffers import Buffers, RotatingBuffers, random_pad
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.given_inputs import Parts
from flexq_bench.measure.inputs import derive_seed
from flexq_bench.measure.weight_rotation import Content, LayerWeights, WeightCopies
from flexq_bench.measure.work import Work
from flexq_bench.workloads.case import Case

PROBE_DISTRIBUTION = "random-bytes-v1"
_PLAIN = (PackedOperand, dict, torch.Tensor, torch.nn.Parameter)
_MIN_PACKED_SHARE = 0.25  # of the bytes of the codes or values


class Subject(ABC):
    """A kernel at one shape, ready to be checked and placed."""

    spec: KernelSpec
    input_distribution: str

    @property
    @abstractmethod
    def copy_bytes(self) -> int:
        """Bytes of one copy of the weights in this kernel's layout; 0: the kernel reads none."""

    @property
    def is_updated(self) -> bool:
        """True if a launch changes its inputs, so that no two of a sample may have the same."""
        return False

    @property
    def read_bytes(self) -> int | None:
        """Bytes of a copy that a launch must read at least; None: all of them."""
        return None

    @abstractmethod
    def candidates(self) -> Sequence[Config]:
        """Configurations to choose from; empty: there is no choice."""

    @abstractmethod
    def default_config(self) -> Config | None:
        """Return the configuration that runs if none is chosen."""

    @property
    @abstractmethod
    def tuning_bucket(self) -> int:
        """Number of tokens, rounded as far as it affects the choice among the candidates."""

    @abstractmethod
    def narrow(self, config: Config | None) -> None:
        """Leave out weights that this configuration doesn't read."""

    @abstractmethod
    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        """Check the results on inputs drawn from the seed."""

    @abstractmethod
    def place(
        self, copies: int, *, seed: int, weights: Sequence[PackedOperand] | None = None
    ) -> Buffers:
        """Allocate all buffers of a launch anew.

        weights: copies of another subject; those with the same number, contents and layout are used
        again.
        """

    def given(self, parts: Parts) -> Any:
        """The inputs of these parts, as `Buffers.fill` takes them.

        Raises ValueError if one is missing, or if there are none to give.
        """
        raise ValueError(f"{self.spec.label} has no inputs that can be given")


def plain_operand(spec: KernelSpec, packed: PackedOperand) -> PackedOperand:
    """The same buffers as tensors without attributes of an external kernel.

    Its methods could give each copy of the weights the same memory. Raises KernelError for
    subclasses, which have methods of their own.
    """
    if not spec.is_external:
        return packed
    for part in (packed, packed.buffers, *packed.buffers.values()):
        if type(part) not in _PLAIN:
            raise KernelError(
                f"weights are packed as a {type(part).__name__}: return plain tensors, which are "
                "copied and rewritten"
            )
    buffers = {name: torch.Tensor.detach(buffer) for name, buffer in packed.buffers.items()}
    return PackedOperand(buffers, packed.rows, packed.k)


def check_packed(spec: KernelSpec, packed: PackedOperand, values: int, what: str) -> None:
    """Raise KernelError if an external kernel keeps its weights elsewhere than in `packed`.

    They are then neither rewritten nor cold. No lossless compression makes codes of normal weights
    that small. values: bytes of the codes or values; what: their name.
    """
    if spec.is_external and packed.nbytes < values * _MIN_PACKED_SHARE:
        raise KernelError(
            f"{packed.nbytes:,} bytes were made of {values:,} bytes of {what}: return all that "
            "launches read of them, which is copied and rewritten; a handle is not"
        )


class CopiedSubject(Subject):
    """A subject whose launches read copies of weights, or of other inputs, in turn."""

    def __init__(
        self, case: Case, device: torch.device, rewriting: Rewriting, weights: LayerWeights
    ) -> None:
        self._case, self._device = case, device
        self._rewriting, self._weights = rewriting, weights

    @property
    def first(self) -> Content:
        """The first content of the weights."""
        return self._weights.first(1)[0]

    @property
    def copy_bytes(self) -> int:
        return self.first.packed.nbytes

    @abstractmethod
    def _work(self, seed: int) -> Work:
        """The launches of a placement. seed: derived from the secret."""

    def place(
        self, copies: int, *, seed: int, weights: Sequence[PackedOperand] | None = None
    ) -> Buffers:
        drawn = derive_seed(self._rewriting.secret, self._case.key, seed)
        contents = self._weights.first(self._rewriting.weight_contents(copies))
        pad = random_pad(self._device, seed)
        draw = random.Random(drawn)
        if isinstance(weights, WeightCopies) and len(weights) == copies and weights.have(contents):
            weights.deal_again(contents, draw)
        else:
            weights = WeightCopies(contents, copies, draw)
        return RotatingBuffers(
            self._work(drawn),
            weights,
            contents[0],
            budget=self._rewriting.pool_bytes(self._case.cache, weights[0].nbytes),
            rewritten_bytes=self._rewriting.protocol.rewritten_bytes,
            seed=drawn,
            pad=pad,
        )

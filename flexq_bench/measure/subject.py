"""Subject of a measurement: a kernel bound to a shape, whose buffers can be placed repeatedly."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, PackedOperand
from flexq_bench.kernels.errors import KernelError
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.buffers import Buffers, RotatingBuffers, random_pad
from flexq_bench.measure.check import CheckResult
from flexq_bench.measure.weight_rotation import Content, WeightCopies
from flexq_bench.measure.work import Work
from flexq_bench.workloads.case import Case

PROBE_DISTRIBUTION = "random-bytes-v1"
_PLAIN = (PackedOperand, dict, torch.Tensor, torch.nn.Parameter)


class Subject(ABC):
    """A kernel at one shape, ready to be checked and placed."""

    spec: KernelSpec
    input_distribution: str

    @property
    @abstractmethod
    def copy_bytes(self) -> int:
        """Bytes of one copy of the weights in this kernel's layout; 0: the kernel reads none."""

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
    def place(self, copies: int, *, seed: int, shared_with: Buffers | None = None) -> Buffers:
        """Allocate all buffers of a launch anew.

        shared_with: another subject's buffers; weight copies with the same number, contents and
        layout are taken from there.
        """


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


def placed_buffers(
    make_work: Callable[[], Work],
    contents: Sequence[Content],
    copies: int,
    case: Case,
    device: torch.device,
    rewriting: Rewriting,
    *,
    seed: int,
    drawn: int,
    shared_with: Buffers | None,
) -> RotatingBuffers:
    """Buffers of launches on copies of the weights with these contents in turn.

    seed: of the placement. drawn: derived from the secret. shared_with: buffers whose copies are
    taken if they have the same contents.
    """
    pad = random_pad(device, seed)
    weights = None if shared_with is None else shared_with.weights
    if not (
        isinstance(weights, WeightCopies) and len(weights) == copies and weights.have(contents)
    ):
        weights = WeightCopies(contents, copies, random.Random(drawn))
    return RotatingBuffers(
        make_work(),
        weights,
        contents[0],
        budget=rewriting.pool_bytes(case.cache, weights[0].nbytes),
        rewritten_bytes=rewriting.protocol.rewritten_bytes,
        seed=drawn,
        pad=pad,
    )

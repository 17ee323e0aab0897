"""Subject of a measurement: a kernel bound to a shape, whose buffers can be placed repeatedly."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from flexq_bench.kernels.contract import (
    Config,
    Kernel,
    KernelSpec,
    PackedOperand,
    Probe,
)
from flexq_bench.kernels.errors import KernelError
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import reference_of
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.buffers import Buffers, ProbeBuffers, RotatingBuffers, random_pad
from flexq_bench.measure.check import CheckResult, check_linear
from flexq_bench.measure.inputs import (
    INPUT_DISTRIBUTION,
    LinearInputs,
    derive_seed,
    realistic_inputs,
    realistic_weight,
)
from flexq_bench.measure.linear_work import Launch, LinearWork, stage_input
from flexq_bench.measure.weight_rotation import (
    Content,
    LayerWeights,
    SharedWeights,
    WeightCopies,
)
from flexq_bench.measure.work import Work
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

PROBE_DISTRIBUTION = "random-bytes-v1"
_PLAIN = (PackedOperand, dict, torch.Tensor, torch.nn.Parameter)
_MIN_PACKED_SHARE = 0.25  # of the bytes of the weights' codes


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


def bind(
    kernel: Kernel,
    spec: KernelSpec,
    case: Case,
    device: torch.device,
    seed: int,
    rewriting: Rewriting,
    shared: SharedWeights,
) -> Subject:
    """The subject of a case: draw its inputs from the seed and pack them.

    spec: of the kernel, which its code can't change. The kernel's name does not affect the draw:
    all kernels have the same real values. M does not affect the weights: cases of one kernel and
    layer find them in `shared`. Inputs that change between samples are drawn from the secret of
    `rewriting`.
    """
    if isinstance(kernel, Probe):
        drawn = derive_seed(seed, case.gemm, "timed")
        return _ProbeSubject(kernel, spec, case.gemm, device, drawn)
    n, k = case.gemm.n, case.gemm.k
    bound = BoundKernel(kernel, spec, case, device)
    weights = shared.get(
        (spec.label, n, k, seed, rewriting.secret),
        lambda: _layer_weights(bound, seed, rewriting.secret),
    )
    return _LinearSubject(bound, seed, rewriting, weights)


def _layer_weights(bound: BoundKernel, seed: int, secret: int) -> LayerWeights:
    kernel, spec = bound.kernel, bound.spec
    n, k = bound.gemm.n, bound.gemm.k

    def draw(index: int) -> Content:
        # The first content is that of every process with this seed; the others are not known.
        parts = ("timed weights",) if index == 0 else ("timed weights", index, secret)
        operand = realistic_weight(kernel, n, k, bound.device, derive_seed(seed, n, k, *parts))
        packed = _plain(spec, kernel.pack_weight(operand.clone()))
        _check_packed(spec, packed, operand)
        return Content(operand, packed)

    return LayerWeights(draw)


def _plain(spec: KernelSpec, packed: PackedOperand) -> PackedOperand:
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


def _check_packed(spec: KernelSpec, packed: PackedOperand, operand: Operand) -> None:
    """Raise KernelError if an external kernel keeps its weights elsewhere than in `packed`.

    They are then neither rewritten nor cold. No lossless compression makes codes of normal weights
    that small.
    """
    values = _code_bytes(spec, operand)
    if spec.is_external and packed.nbytes < values * _MIN_PACKED_SHARE:
        raise KernelError(
            f"{packed.nbytes:,} bytes were made of {values:,} bytes of weights: return all that "
            "launches read of them, which is copied and rewritten; a handle is not"
        )


def _code_bytes(spec: KernelSpec, operand: Operand) -> int:
    return operand.rows * operand.k * spec.weight.bits // 8


class _LinearSubject(Subject):
    input_distribution = INPUT_DISTRIBUTION

    def __init__(
        self, bound: BoundKernel, seed: int, rewriting: Rewriting, weights: LayerWeights
    ) -> None:
        self.spec = bound.spec
        self._bound, self._kernel, self._rewriting = bound, bound.kernel, rewriting
        self._weights = weights
        drawn = derive_seed(seed, bound.gemm, "timed")
        w = self._first.operand
        self._inputs = realistic_inputs(bound.kernel, bound.gemm, bound.device, drawn, w=w)
        self._reference = reference_of(bound.spec, self._inputs.x, w)

    @property
    def _first(self) -> Content:
        return self._weights.first(1)[0]

    @property
    def copy_bytes(self) -> int:
        return self._first.packed.nbytes

    @property
    def read_bytes(self) -> int | None:
        # An external kernel may pack bytes that no launch reads.
        return _code_bytes(self.spec, self._first.operand) if self.spec.is_external else None

    def candidates(self) -> Sequence[Config]:
        return self._kernel.candidates(self._bound.gemm)

    @property
    def tuning_bucket(self) -> int:
        return self._kernel.tuning_bucket(self._bound.gemm.m)

    def narrow(self, config: Config | None) -> None:
        self._weights = self._weights.repacked(
            lambda w: _plain(self.spec, self._kernel.narrow(w, config))
        )

    def default_config(self) -> Config | None:
        return self._kernel.default_config(self._bound.gemm)

    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        def run(inputs: LinearInputs, out: torch.Tensor) -> torch.Tensor | None:
            # may share memory with the codes
            x = stage_input(self._bound, inputs).clone()
            launch = _launcher(self._bound)
            return launch(x, self._kernel.pack_weight(inputs.w), out, config)

        return check_linear(self._bound, run, seed=seed, tolerance=tolerance)

    def place(self, copies: int, *, seed: int, shared_with: Buffers | None = None) -> Buffers:
        pad = random_pad(self._bound.device, seed)
        drawn = derive_seed(self._rewriting.secret, self._bound.case.key, seed)
        contents = self._weights.first(self._rewriting.weight_contents(copies))
        weights = _weight_copies(contents, copies, drawn, shared_with)
        launch, own = _launcher(self._bound), self._inputs
        work = LinearWork(self._bound, launch, own, self._reference, self._rewriting, drawn)
        return _rotating(work, weights, self._first, self._bound.case, self._rewriting, drawn, pad)


class _ProbeSubject(Subject):
    input_distribution = PROBE_DISTRIBUTION

    def __init__(
        self, probe: Probe, spec: KernelSpec, gemm: GemmWorkload, device: torch.device, seed: int
    ) -> None:
        self.spec = spec
        self._probe, self._gemm, self._device = probe, gemm, device
        self._operand = probe.allocate(gemm, device, seed)

    @property
    def copy_bytes(self) -> int:
        return self._operand.nbytes if self.spec.reads_weights else 0

    def candidates(self) -> Sequence[Config]:
        return self._probe.candidates(self._gemm)

    @property
    def tuning_bucket(self) -> int:
        return self._gemm.m

    def narrow(self, config: Config | None) -> None:
        """A probe has only the bytes that it reads."""

    def default_config(self) -> Config | None:
        return None

    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        operand = self._probe.allocate(self._gemm, self._device, seed)
        result = self._probe.check(operand, config)
        wrong = "" if result.exact else f"{self.spec.label} is wrong: {result.detail}"
        return CheckResult(None, result.exact, wrong)

    def place(self, copies: int, *, seed: int, shared_with: Buffers | None = None) -> Buffers:
        pad = random_pad(self._device, seed)
        return ProbeBuffers(self._probe, [self._operand.clone() for _ in range(copies)], pad)


def _weight_copies(
    contents: Sequence[Content], copies: int, seed: int, shared_with: Buffers | None
) -> WeightCopies:
    """Copies with these contents in turn: those of other buffers if they have the same."""
    weights = None if shared_with is None else shared_with.weights
    if isinstance(weights, WeightCopies) and len(weights) == copies and weights.have(contents):
        return weights
    return WeightCopies(contents, copies, random.Random(seed))


def _rotating(
    work: Work,
    weights: WeightCopies,
    first: Content,
    case: Case,
    rewriting: Rewriting,
    seed: int,
    pad: torch.Tensor,
) -> RotatingBuffers:
    return RotatingBuffers(
        work,
        weights,
        first,
        budget=rewriting.pool_bytes(case.cache, weights[0].nbytes),
        rewritten_bytes=rewriting.protocol.rewritten_bytes,
        seed=seed,
        pad=pad,
    )


def _launcher(bound: BoundKernel) -> Launch:
    """A launch of the case's stage, with its other buffers allocated now."""
    kernel = bound.kernel
    if bound.case.stage == "gemm":

        def gemm(
            x: PackedOperand, w: PackedOperand, out: torch.Tensor, config: Config | None
        ) -> torch.Tensor | None:
            return kernel.gemm(x, w, out, config=config)

        return gemm
    packed = kernel.empty_activation(bound.gemm.m, bound.gemm.k, bound.device)

    def linear(
        x: PackedOperand, w: PackedOperand, out: torch.Tensor, config: Config | None
    ) -> torch.Tensor | None:
        return kernel.linear(x.buffers["real"], packed, w, out, config=config)

    return linear

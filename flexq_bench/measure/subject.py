"""What is timed: a kernel bound to a shape, with buffers placed anew as often as asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from flexq_bench.measure.check import CheckResult, check_linear, judge_error
from flexq_bench.measure.inputs import (
    INPUT_DISTRIBUTION,
    LinearInputs,
    derive_seed,
    realistic_inputs,
)
from kernels.contract import Config, Kernel, KernelSpec, LinearKernel, PackedOperand, Probe
from kernels.reference import Reference, reference_gemm
from workloads.case import Case
from workloads.gemm import GemmWorkload

PROBE_DISTRIBUTION = "random-bytes-v1"
_PAD_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}


class Buffers(ABC):
    """One placement: copies of the weights at fresh addresses and what a launch needs beside."""

    weights: Sequence[PackedOperand]

    @property
    def copies(self) -> int:
        return len(self.weights)

    def holds(self, operand: PackedOperand) -> bool:
        """Whether each copy of the weights is this operand: the same bytes in the same layout."""
        mine = self.weights[0].buffers
        return mine.keys() == operand.buffers.keys() and all(
            buffer.dtype == mine[name].dtype and torch.equal(buffer, mine[name])
            for name, buffer in operand.buffers.items()
        )

    @abstractmethod
    def launch(self, i: int, config: Config | None) -> None:
        """One launch on copy i."""

    def bound(self, config: Config | None) -> Callable[[int], None]:
        """`launch` with its configuration given."""
        return lambda i: self.launch(i, config)

    @abstractmethod
    def poison(self) -> None:
        """Fill the output with what no right launch leaves there."""

    @abstractmethod
    def inspect(self, config: Config | None, tolerance: float) -> str:
        """What is wrong with the output of the launches since `poison`; empty: nothing."""

    def fill(self, inputs: LinearInputs, config: Config | None, *, weights: bool) -> None:
        """Replace the activations in place, and the weights if told; the output is poisoned.

        Raises ValueError if these buffers have no inputs.
        """
        raise ValueError("these buffers have no inputs that can be given")

    def output(self) -> torch.Tensor:
        """FP16 [M,N], as the latest launch left it. Raises ValueError where there is none."""
        raise ValueError("these buffers have no output")


class Subject(ABC):
    """A kernel at one shape, ready to be checked and placed."""

    spec: KernelSpec
    input_distribution: str

    @property
    @abstractmethod
    def copy_bytes(self) -> int:
        """Bytes that one copy of the weights takes in this kernel's layout; 0: reads none."""

    @abstractmethod
    def candidates(self) -> Sequence[Config]:
        """Configurations to choose from; empty: there is nothing to choose."""

    @abstractmethod
    def default_config(self) -> Config | None:
        """What runs where nothing is chosen."""

    @property
    @abstractmethod
    def tuning_bucket(self) -> int:
        """Tokens, as far as they matter to the choice among the candidates."""

    @abstractmethod
    def narrow(self, config: Config | None) -> None:
        """Let go of weights that this configuration doesn't read."""

    @abstractmethod
    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        """Whether it computes the right thing on inputs drawn from the seed."""

    @abstractmethod
    def place(self, copies: int, *, seed: int, beside: Buffers | None = None) -> Buffers:
        """Allocate everything that a launch touches anew.

        beside: another subject's; as many weight copies of the same bytes in the same layout are
        taken from there.
        """


def bind(kernel: Kernel, case: Case, device: torch.device, seed: int) -> Subject:
    """The subject of a case: draws its inputs from the seed and packs them.

    The kernel's name is not part of what is drawn: all kernels are timed on the same real values.
    """
    drawn = derive_seed(seed, case.gemm, "timed")
    if isinstance(kernel, Probe):
        return _ProbeSubject(kernel, case.gemm, device, drawn)
    return _LinearSubject(kernel, case, device, drawn)


class _LinearSubject(Subject):
    input_distribution = INPUT_DISTRIBUTION

    def __init__(self, kernel: LinearKernel, case: Case, device: torch.device, seed: int) -> None:
        self.spec = kernel.spec
        self._kernel, self._case, self._device = kernel, case, device
        self._inputs = realistic_inputs(kernel, case.gemm, device, seed)
        exact = reference_gemm(self._inputs.x, self._inputs.w)
        self._reference = exact.rounded_to(kernel.spec.rounds_to)
        self._w = kernel.pack_weight(self._inputs.w)

    @property
    def copy_bytes(self) -> int:
        return self._w.nbytes

    def candidates(self) -> Sequence[Config]:
        return self._kernel.candidates(self._case.gemm)

    @property
    def tuning_bucket(self) -> int:
        return self._kernel.tuning_bucket(self._case.gemm.m)

    def narrow(self, config: Config | None) -> None:
        self._w = self._kernel.narrow(self._w, config)

    def default_config(self) -> Config | None:
        return self._kernel.default_config(self._case.gemm)

    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        gemm = self._case.gemm

        def run(inputs: LinearInputs, out: torch.Tensor) -> None:
            launch = _Launch(self._kernel, self._case, inputs, out)
            launch(self._kernel.pack_weight(inputs.w), config)

        return check_linear(
            self._kernel, gemm, self._case.stage, self._device, run, seed=seed, tolerance=tolerance
        )

    def place(self, copies: int, *, seed: int, beside: Buffers | None = None) -> Buffers:
        pad = _pad(self._device, seed)
        gemm = self._case.gemm
        weights: Sequence[PackedOperand]
        if beside is not None and beside.copies == copies and beside.holds(self._w):
            weights = beside.weights
        else:
            weights = [self._w.clone() for _ in range(copies)]
        out = torch.empty(gemm.m, gemm.n, dtype=torch.float16, device=self._device)
        return _LinearBuffers(
            weights=weights,
            launch=_Launch(self._kernel, self._case, self._inputs, out),
            out=out,
            reference=self._reference,
            pad=pad,
        )


class _LinearBuffers(Buffers):
    """Only the weights rotate: a layer finds its input in the cache, where it was just written."""

    def __init__(
        self,
        weights: Sequence[PackedOperand],
        launch: _Launch,
        out: torch.Tensor,
        reference: Reference,
        pad: torch.Tensor,
    ) -> None:
        self.weights, self._launch = weights, launch
        self._out, self._reference = out, reference
        self._pad = pad  # held, so that the others don't get the addresses of the last placement

    def launch(self, i: int, config: Config | None) -> None:
        self._launch(self.weights[i], config)

    def poison(self) -> None:
        self._out.fill_(torch.nan)

    def inspect(self, config: Config | None, tolerance: float) -> str:
        return judge_error(self._out, self._reference, tolerance).detail

    def fill(self, inputs: LinearInputs, config: Config | None, *, weights: bool) -> None:
        self._launch.fill(inputs)
        if weights:
            packed = self._launch.packed_weight(inputs, config)
            for copy in self.weights:
                copy.copy_from(packed)
        self.poison()

    def output(self) -> torch.Tensor:
        return self._out


class _ProbeSubject(Subject):
    input_distribution = PROBE_DISTRIBUTION

    def __init__(self, probe: Probe, gemm: GemmWorkload, device: torch.device, seed: int) -> None:
        self.spec = probe.spec
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
        """A probe has the bytes that it reads and no others."""

    def default_config(self) -> Config | None:
        return None

    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        operand = self._probe.allocate(self._gemm, self._device, seed)
        result = self._probe.check(operand, config)
        wrong = "" if result.exact else f"{self.spec.label} is wrong: {result.detail}"
        return CheckResult(None, result.exact, wrong)

    def place(self, copies: int, *, seed: int, beside: Buffers | None = None) -> Buffers:
        pad = _pad(self._device, seed)
        return _ProbeBuffers(self._probe, [self._operand.clone() for _ in range(copies)], pad)


class _ProbeBuffers(Buffers):
    def __init__(self, probe: Probe, operands: list[PackedOperand], pad: torch.Tensor) -> None:
        self._probe, self.weights, self._pad = probe, operands, pad

    def launch(self, i: int, config: Config | None) -> None:
        self._probe.launch(self.weights[i], config)

    def poison(self) -> None:
        """A probe's own check poisons what it looks at."""

    def inspect(self, config: Config | None, tolerance: float) -> str:
        result = self._probe.check(self.weights[-1], config)
        return "" if result.exact else f"wrong on the timed buffers: {result.detail}"


class _Launch:
    """A launch of the case's stage on given weights, with activations allocated now."""

    def __init__(
        self, kernel: LinearKernel, case: Case, inputs: LinearInputs, out: torch.Tensor
    ) -> None:
        self._kernel, self._stage, self._out = kernel, case.stage, out
        if self._stage == "gemm":
            # Packing may share the codes it was given.
            self._packed = kernel.pack_activation(inputs.x).clone()
            return
        self._real = _real(inputs).clone()
        self._packed = kernel.empty_activation(case.gemm.m, case.gemm.k, self._real.device)

    def __call__(self, w: PackedOperand, config: Config | None) -> None:
        if self._stage == "gemm":
            self._kernel.gemm(self._packed, w, self._out, config=config)
        else:
            self._kernel.linear(self._real, self._packed, w, self._out, config=config)

    def fill(self, inputs: LinearInputs) -> None:
        """Replace the activations in place."""
        if self._stage == "gemm":
            self._packed.copy_from(self._kernel.pack_activation(inputs.x))
        else:
            self._real.copy_(_real(inputs))

    def packed_weight(self, inputs: LinearInputs, config: Config | None) -> PackedOperand:
        """The weights as a launch under this configuration reads them."""
        return self._kernel.narrow(self._kernel.pack_weight(inputs.w), config)


def _real(inputs: LinearInputs) -> torch.Tensor:
    if inputs.x_real is None:
        raise ValueError("the linear stage needs real activations, these inputs are codes")
    return inputs.x_real


def _pad(device: torch.device, seed: int) -> torch.Tensor:
    """A block of random size: what is allocated after it lies elsewhere than without it."""
    generator = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, _PAD_BYTES[device.type], (), generator=generator))
    return torch.empty(size, dtype=torch.uint8, device=device)

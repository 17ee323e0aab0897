"""Inputs that a judge draws for a kernel in another process, and the judging of its outputs."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, Protocol

import torch

from flexq_bench.errors import MeasureError
from flexq_bench.kernels.contract import KernelSpec, LinearKernel
from flexq_bench.kernels.operand_tensors import Value
from flexq_bench.kernels.reference import reference_of
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import CheckResult, check_linear, judge_error
from flexq_bench.measure.given_inputs import WEIGHT, Parts, linear_parts, value_parts
from flexq_bench.measure.inputs import (
    LinearInputs,
    derive_seed,
    real_weight,
    realistic_inputs,
    realistic_weight,
)
from flexq_bench.measure.operation_inputs import OperationCase
from flexq_bench.measure.operation_subject import judge_outputs
from flexq_bench.measure.own_quantization import has_own_rule, own_quantization_error
from flexq_bench.measure.shared_tensors import Layout, layout_of
from flexq_bench.measure.work import Outputs
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload

# A turn's results of other operations than linear layers are compared as a whole, which may take
# longer than the turn: those of the first turn with new streamed inputs, and one in this many.
_TURNS_PER_CHECK = 4
Role = Literal["streamed", "fresh"]


@dataclass(frozen=True, slots=True)
class Seeds:
    """Seeds with which a judge's inputs are drawn again.

    fresh, streamed: of these inputs of a turn; streamed None: fresh is of a whole check, which
    draws its inputs itself. launch: number of one of the check's launches; None: all.
    """

    fresh: int
    streamed: int | None = None
    launch: int | None = None

    @property
    def of_whole_check(self) -> bool:
        """Return True if no single launch has these inputs."""
        return self.streamed is None and self.launch is None


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Inputs of a launch, as parts and as the reference takes them. wrong: an error found in them.

    streamed: the same object until others are drawn.
    """

    fresh: Parts
    streamed: Parts
    inputs: Any
    seeds: Seeds
    wrong: str = ""


Run = Callable[[Given], Outputs]  # the outputs of one launch


class JudgedWork(ABC):
    """Inputs that no worker can predict, and the judging of outputs, by name."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Of the outputs that have elements, in the order of their names."""

    @abstractmethod
    def forget(self) -> None:
        """Draw new streamed inputs with the next fresh ones."""

    def streamed(self) -> Parts | None:
        """Streamed inputs that `draw` gives, drawn now or before; None: only `draw` draws them."""
        return None

    @abstractmethod
    def draw(self) -> Given:
        """New fresh inputs, and streamed ones."""

    @abstractmethod
    def given(self, seeds: Seeds) -> Given:
        """The inputs of a turn, drawn again."""

    @abstractmethod
    def is_checked(self) -> bool:
        """Choose whether the latest turn's outputs are compared; called after it."""

    @abstractmethod
    def judge(self, given: Given, outputs: Outputs) -> CheckResult:
        """Check a turn's outputs."""

    @abstractmethod
    def check(self, run: Run) -> tuple[CheckResult, Seeds]:
        """Check whole results, bit for bit where required; also return the seeds of the inputs."""

    @abstractmethod
    def repeat(self, seeds: Seeds, run: Run) -> CheckResult:
        """Check results on the inputs of a turn or of a check, drawn again."""


class JudgedLinear(JudgedWork):
    """A linear layer. elements: rows and columns of a turn's output that are checked, at most."""

    def __init__(
        self,
        kernel: LinearKernel,
        case: Case,
        device: torch.device,
        tolerance: float,
        elements: tuple[int, int],
    ) -> None:
        self._kernel, self._case, self._device = kernel, case, device
        self._tolerance, self._elements = tolerance, elements
        self._streamed: Parts | None = None
        self._seed = 0  # of the weights, as they were drawn last

    @property
    def layout(self) -> Layout:
        gemm, dtype = self._case.gemm, self._kernel.spec.output_dtype
        return [("out", str(dtype).removeprefix("torch."), (gemm.m, gemm.n))]

    def forget(self) -> None:
        self._streamed = None

    def streamed(self) -> Parts:
        return self._weights(new_seed()) if self._streamed is None else self._streamed

    def _weights(self, seed: int) -> Parts:
        gemm = self._case.gemm
        if self._streamed is None or self._seed != seed:
            w = realistic_weight(self._kernel, gemm.n, gemm.k, self._device, seed)
            self._seed, self._streamed = seed, {WEIGHT: w}
        return self._streamed

    def draw(self) -> Given:
        return self._given(self.streamed(), new_seed())

    def given(self, seeds: Seeds) -> Given:
        if seeds.streamed is not None:
            return self._given(self._weights(seeds.streamed), seeds.fresh)
        assert seeds.launch is not None  # a whole check has several inputs
        drawn: list[Given] = []

        def run(given: Given) -> Outputs:
            drawn.append(given)
            return {"out": torch.zeros(())}

        self.repeat(Seeds(seeds.fresh), run)
        return drawn[seeds.launch]

    def _given(self, streamed: Parts, seed: int) -> Given:
        gemm, kernel, device = self._case.gemm, self._kernel, self._device
        w: Any = streamed[WEIGHT]
        inputs = realistic_inputs(kernel, gemm, device, seed, w=w)
        wrong = ""
        if has_own_rule(kernel):
            w_real = real_weight(gemm.n, gemm.k, device, self._seed)
            wrong = own_quantization_error(kernel, inputs, w_real, derive_seed(seed, "own rule"))
        return Given(linear_parts(inputs), streamed, inputs, Seeds(seed, self._seed), wrong)

    def is_checked(self) -> bool:
        return True

    def judge(self, given: Given, outputs: Outputs) -> CheckResult:
        """Compare elements that no worker can predict."""
        gemm, inputs = self._case.gemm, given.inputs
        rows, columns = (
            self._chosen(count, most, derive_seed(given.seeds.fresh, what))
            for what, count, most in zip(
                ("rows", "columns"), (gemm.m, gemm.n), self._elements, strict=True
            )
        )
        reference = reference_of(
            self._kernel.spec, inputs.x.take_rows(rows), inputs.w.take_rows(columns)
        )
        return judge_error(outputs["out"][rows][:, columns], reference, self._tolerance)

    def check(self, run: Run) -> tuple[CheckResult, Seeds]:
        seeds = Seeds(new_seed())
        return self.repeat(seeds, run), seeds

    def repeat(self, seeds: Seeds, run: Run) -> CheckResult:
        if not seeds.of_whole_check:
            given = self.given(seeds)
            found = CheckResult(None, None, given.wrong)
            return found if given.wrong else self.judge(given, run(given))

        numbers = count()

        def launched(inputs: LinearInputs, out: torch.Tensor) -> None:
            of_one = Seeds(seeds.fresh, launch=next(numbers))
            out.copy_(run(Given(linear_parts(inputs), {WEIGHT: inputs.w}, inputs, of_one))["out"])

        bound = BoundKernel(self._kernel, self._kernel.spec, self._case, self._device)
        return check_linear(bound, launched, seed=seeds.fresh, tolerance=self._tolerance)

    def _chosen(self, count: int, most: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(count, generator=generator, device="cpu")[:most]
        return chosen.sort().values.to(self._device)


class Reference(Protocol):
    """The definition of an operation at one set of parameters, drawn from seeds."""

    def draw(self, role: Role, seed: int) -> Parts: ...

    def judge(self, streamed: int, fresh: int, outputs: Outputs) -> CheckResult:
        """Compare whole outputs with those that the definition expects of drawn inputs."""
        ...


class OwnReference:
    """A definition whose functions this process has."""

    def __init__(
        self, case: Case, spec: KernelSpec, device: torch.device, tolerance: float
    ) -> None:
        assert isinstance(case.workload, OperationWorkload)
        self._of = OperationCase(case.workload, spec)
        self._device, self._tolerance = device, tolerance
        streamed = self._of.streamed(case.cache)
        fresh = tuple(i for i in self._of.definition.inputs if i not in streamed)
        self._inputs = {"streamed": streamed, "fresh": fresh}
        self._drawn: dict[Role, tuple[int, Mapping[str, Value]]] = {}  # the latest, by seed

    def draw(self, role: Role, seed: int) -> Parts:
        return value_parts(self._values(role, seed))

    def judge(self, streamed: int, fresh: int, outputs: Outputs) -> CheckResult:
        inputs = {**self._values("streamed", streamed), **self._values("fresh", fresh)}
        found = judge_outputs(self._of, inputs, outputs, self._tolerance)
        if not found.is_correct:  # then the kernel may have had others
            self._drawn.clear()
            again = {**self._values("streamed", streamed), **self._values("fresh", fresh)}
            pairs = ((inputs[name].real().double(), again[name].real().double()) for name in inputs)
            if not all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs):
                raise MeasureError(
                    f"{self._of.definition.name} draws other inputs from the same seed: take all "
                    "random numbers from the generator that it is given"
                )
        return found

    def _values(self, role: Role, seed: int) -> Mapping[str, Value]:
        known = self._drawn.get(role)
        if known is None or known[0] != seed:
            generator = torch.Generator(self._device).manual_seed(seed)
            known = seed, self._of.draw(self._inputs[role], generator)
            self._drawn[role] = known
        return known[1]


class JudgedOperation(JudgedWork):
    """Any other operation. reference: of this process, or of one that isn't the kernel's."""

    def __init__(self, case: Case, spec: KernelSpec, reference: Reference) -> None:
        assert isinstance(case.workload, OperationWorkload)
        of = OperationCase(case.workload, spec)
        self._reference = reference
        self._has_fresh = len(of.streamed(case.cache)) < len(of.definition.inputs)
        outputs = of.outputs(torch.device("cpu"))
        self._layout = layout_of(with_elements(outputs))
        self._streamed: Parts | None = None
        self._seed = 0  # of the streamed inputs
        self._is_first = True  # since streamed inputs were drawn

    @property
    def layout(self) -> Layout:
        return self._layout

    def forget(self) -> None:
        self._streamed = None

    def draw(self) -> Given:
        # Where nothing is fresh, a launch would have the inputs of the turn before.
        if self._streamed is None or not self._has_fresh:
            self._seed = new_seed()
            self._streamed = self._reference.draw("streamed", self._seed)
            self._is_first = True
        return self._given(self._streamed, Seeds(new_seed(), self._seed))

    def given(self, seeds: Seeds) -> Given:
        assert seeds.streamed is not None  # checks are turns
        return self._given(self._reference.draw("streamed", seeds.streamed), seeds)

    def _given(self, streamed: Parts, seeds: Seeds) -> Given:
        return Given(self._reference.draw("fresh", seeds.fresh), streamed, None, seeds)

    def is_checked(self) -> bool:
        checked, self._is_first = self._is_first, False
        return checked or secrets.randbelow(_TURNS_PER_CHECK) == 0

    def judge(self, given: Given, outputs: Outputs) -> CheckResult:
        assert given.seeds.streamed is not None  # checks are turns
        return self._reference.judge(given.seeds.streamed, given.seeds.fresh, outputs)

    def check(self, run: Run) -> tuple[CheckResult, Seeds]:
        self.forget()
        given = self.draw()
        return self.judge(given, run(given)), given.seeds

    def repeat(self, seeds: Seeds, run: Run) -> CheckResult:
        given = self.given(seeds)
        return self.judge(given, run(given))


def with_elements(outputs: Outputs) -> dict[str, torch.Tensor]:
    """The outputs that have elements, in the order of their names."""
    return {name: out for name, out in sorted(outputs.items()) if out.numel()}


def new_seed() -> int:
    """A seed that nobody can predict."""
    return secrets.randbits(62)

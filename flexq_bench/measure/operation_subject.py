"""Any operation but a linear layer as the subject of a measurement."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from flexq_bench.errors import MeasureError
from flexq_bench.kernels.contract import Config, KernelSpec, OperationKernel, PackedOperand
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.operand_tensors import Value, buffers_of
from flexq_bench.kernels.reference import Reference
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.buffers import poison
from flexq_bench.measure.check import CheckResult, judge_error
from flexq_bench.measure.given_inputs import Parts, values_of
from flexq_bench.measure.inputs import derive_seed
from flexq_bench.measure.operation_inputs import OPERATION_DISTRIBUTION, OperationCase
from flexq_bench.measure.subject import CopiedSubject, check_packed, plain_operand
from flexq_bench.measure.weight_rotation import Content, LayerWeights, SharedWeights
from flexq_bench.measure.work import WRONG_UNANNOUNCED, KeptLaunches, Outputs, Work
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.operation import OperationWorkload

_CHECKED_ELEMENTS = 2048  # of each output of a kept launch
_JUDGED_LAUNCHES = 4  # of a placement's kept ones; a reference computes whole outputs

Inputs = Mapping[str, Value]


def _packed(inputs: Inputs) -> PackedOperand:
    return PackedOperand(buffers_of(inputs), 0, 0)


class OperationSubject(CopiedSubject):
    """An operation, with its streamed inputs (of which there are copies) and its fresh ones."""

    input_distribution = OPERATION_DISTRIBUTION

    def __init__(
        self,
        kernel: OperationKernel,
        spec: KernelSpec,
        case: Case,
        device: torch.device,
        seed: int,
        rewriting: Rewriting,
        shared: SharedWeights,
    ) -> None:
        assert isinstance(case.workload, OperationWorkload)
        self.spec, self._kernel = spec, kernel
        self._of = OperationCase(case.workload, spec)
        if spec.updates and case.cache == "hot":
            raise UnsupportedError(
                f"{spec.label} writes into its inputs, of which each launch needs others: measure "
                "it cold"
            )
        of = self._of.definition
        if all(0 in of.shape_of(output.name, self._of.values) for output in of.outputs):
            raise UnsupportedError(f"no output of {case.workload.key} has an element")
        self.streamed = self._of.streamed(case.cache)
        names = {tensor.name for tensor in self.streamed}
        self._fresh = tuple(i for i in self._of.definition.inputs if i.name not in names)
        self._seed = derive_seed(seed, case.workload, "timed")
        weights = shared.get(
            (spec.label, case.workload, case.cache, seed, rewriting.secret),
            lambda: LayerWeights(self._content),
        )
        super().__init__(case, device, rewriting, weights)

    def _generator(self, *parts: object) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(derive_seed(self._seed, *parts))

    def _content(self, index: int) -> Content:
        # The first content is that of every process with this seed; the others are not known.
        parts = ("streamed",) if index == 0 else ("streamed", index, self._rewriting.secret)
        return self.content(self._of.draw(self.streamed, self._generator(*parts)))

    def content(self, inputs: Inputs) -> Content:
        """Pack streamed inputs, and keep what the reference needs."""
        given = _packed({name: _copied(value) for name, value in inputs.items()})
        packed = plain_operand(self.spec, self._kernel.prepare(self._of.workload, given))
        check_packed(self.spec, packed, self._of.bytes_of(self.streamed), "streamed inputs")
        return Content(inputs, packed)

    @property
    def is_updated(self) -> bool:
        return bool(self.spec.updates)

    @property
    def read_bytes(self) -> int | None:
        floor = self._of.floor_bytes
        streamed = self._of.bytes_of(self.streamed)
        return streamed if floor is None else min(floor, streamed) or None

    def candidates(self) -> Sequence[Config]:
        return self._kernel.candidates(self._of.workload)

    def default_config(self) -> Config | None:
        return self._kernel.default_config(self._of.workload)

    @property
    def tuning_bucket(self) -> int:
        return 0

    def narrow(self, config: Config | None) -> None:
        """A kernel has only the inputs that it reads."""

    def check(self, config: Config | None, *, seed: int, tolerance: float) -> CheckResult:
        generator = torch.Generator(self._device).manual_seed(seed)
        streamed = self._of.draw(self.streamed, generator)
        fresh = self._of.draw(self._fresh, generator)
        out = self._of.outputs(self._device)
        for tensor in out.values():
            poison(tensor)
        x, w = _packed(fresh).clone(), self.content(streamed).packed
        made = self._kernel.launch(self._of.workload, x, w, out, config)
        return judge_outputs(self._of, {**streamed, **fresh}, made or out, tolerance)

    def given(self, parts: Parts) -> Inputs:
        return values_of(self._of, self._of.definition.inputs, parts)

    def streamed_of(self, inputs: Inputs) -> Inputs:
        """Those of the inputs that are streamed."""
        return {tensor.name: inputs[tensor.name] for tensor in self.streamed}

    def fresh_of(self, inputs: Inputs) -> Inputs:
        """Those of the inputs that are fresh."""
        return {tensor.name: inputs[tensor.name] for tensor in self._fresh}

    def _work(self, seed: int) -> Work:
        return _OperationWork(self, self._kernel, self._of, self._rewriting, seed)

    def fresh(self, index: int, secret: int) -> Inputs:
        """Fresh inputs; those of index 0 are the subject's own."""
        parts = ("fresh",) if index == 0 else ("fresh", index, secret)
        return self._of.draw(self._fresh, self._generator(*parts))

    @property
    def device(self) -> torch.device:
        return self._device


class _OperationWork(Work):
    """seed: of fresh inputs, and of the elements of their results to check."""

    def __init__(
        self,
        subject: OperationSubject,
        kernel: OperationKernel,
        of: OperationCase,
        rewriting: Rewriting,
        seed: int,
    ) -> None:
        self._subject, self._kernel, self._of = subject, kernel, of
        first = subject.fresh(0, seed)
        count = rewriting.activation_contents(_packed(first))
        self._given = [first, *(subject.fresh(i + 1, seed) for i in range(count))]
        *self.inputs, self.unseen = [_packed(given) for given in self._given]
        self.read_only = kernel.read_only()
        pairs = subject.spec.updates
        names = {name for pair in pairs for name in pair}
        self.updated = frozenset(
            name
            for name in (*subject.first.packed.buffers, *of.outputs(subject.device))
            if name.rpartition(".")[0] in names
        )
        self.fixed = frozenset(
            f"{tensor.name}.values" for tensor in of.definition.inputs if tensor.role == "index"
        )
        if "w" in self.read_only:  # else what a kernel made of them, in a form of its own
            # Weights stay what they are, unless nothing else changes from launch to launch.
            all_are_fixed = self.inputs[0].buffers.keys() <= self.fixed
            streamed = [i.name for i in subject.streamed if all_are_fixed or i.role != "weight"]
            self.exchanged = frozenset(
                name for name in subject.first.packed.buffers if name.rpartition(".")[0] in streamed
            )
        host = torch.Generator().manual_seed(seed)
        self.elements = {
            name: torch.randint(out.numel(), (_CHECKED_ELEMENTS,), generator=host, device="cpu").to(
                subject.device
            )
            for name, out in of.outputs(subject.device).items()
            if out.numel()
        }
        self._expected: dict[tuple[int, int], dict[str, Reference]] = {}

    def allocate(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        outputs = self._of.outputs(self._subject.device)
        for out in outputs.values():
            if out.is_floating_point():
                noise = torch.randn(
                    out.shape, generator=generator, device=out.device, dtype=torch.float32
                )
                out.copy_(noise)
            else:
                out.zero_()
        return outputs

    def launch(
        self, x: PackedOperand, w: PackedOperand, out: Outputs, config: Config | None
    ) -> Outputs | None:
        return self._kernel.launch(self._of.workload, x, w, out, config)

    def judge(self, outputs: Outputs, tolerance: float) -> str:
        inputs = {**self._subject.first.operand, **self._given[0]}
        return judge_outputs(self._of, inputs, outputs, tolerance).detail

    def judge_kept(
        self, kept: KeptLaunches, draw: random.Random, tolerance: float
    ) -> tuple[str, int]:
        if self._of.definition.accepts is not None:
            return "", 0  # it judges whole outputs, as the announced checks do
        count = len(kept.weights)
        for place in draw.sample(range(count), min(count, _JUDGED_LAUNCHES)):
            content, given = kept.weights[place], self._given[kept.activations[place]]
            expected = self._of.expected({**content.operand, **given})
            for name, at in self.elements.items():
                problem = _wrong(
                    kept.outputs[name][place], _elements(expected[name], at), tolerance, name
                )
                if problem:
                    _check_reference(self._of, {**content.operand, **given}, expected, tolerance)
                    return f"{WRONG_UNANNOUNCED}: {problem}", place
        return "", 0

    def stage(self, inputs: Inputs) -> PackedOperand:
        return _packed(self._subject.fresh_of(inputs))

    def content(self, inputs: Inputs, config: Config | None) -> Content:
        return self._subject.content(self._subject.streamed_of(inputs))


def judge_outputs(
    of: OperationCase, inputs: Inputs, outputs: Outputs, tolerance: float
) -> CheckResult:
    """Compare whole outputs, `<output>.<part>`, with what the definition expects of the inputs.

    Raises MeasureError if they are wrong and the definition expects others when it is asked again.
    """
    accepted = of.accepted(inputs, outputs)
    result = CheckResult(None, None)
    expected = {} if set(accepted) == set(outputs) else of.expected(inputs)
    for name, out in outputs.items():
        if name in accepted:
            right = accepted[name]
            if not bool(right.all()):
                count = int((~right).sum())
                detail = f"{name.removesuffix('.values')}: {count:,} of {right.numel():,} are wrong"
                result = result.merged(CheckResult(None, None, detail))
            continue
        if not out.numel():
            continue
        y, known = _comparable(out, expected[name])
        judged = judge_error(y, known, tolerance, _shown(name))
        result = result.merged(judged)
    if not result.is_correct:
        _check_reference(of, inputs, expected, tolerance)
        again = of.accepted(inputs, outputs)
        if not all(torch.equal(right, again[name]) for name, right in accepted.items()):
            raise _not_deterministic(of, "`accepts`")
    return result


def _check_reference(
    of: OperationCase, inputs: Inputs, expected: Mapping[str, Reference], tolerance: float
) -> None:
    """Raise MeasureError if the definition now expects results beyond the tolerance of others."""
    again = of.expected(inputs) if expected else {}
    for name, known in expected.items():
        if known.y.numel() and _wrong(known.y, again[name], tolerance, name):
            raise _not_deterministic(of, "the reference")


def _not_deterministic(of: OperationCase, what: str) -> MeasureError:
    return MeasureError(
        f"{what} of {of.definition.name} is not deterministic: called again with the same inputs, "
        "it returns other results"
    )


def _wrong(y: torch.Tensor, known: Reference, tolerance: float, name: str) -> str:
    y, known = _comparable(y, known)
    return judge_error(y, known, tolerance, _shown(name)).detail


def _shown(name: str) -> str:
    return name.removesuffix(".values").replace(".", "_")


def _comparable(y: torch.Tensor, known: Reference) -> tuple[torch.Tensor, Reference]:
    """Take what the reference has, where any result is right."""
    any_is_right = known.y.isnan()
    if not bool(any_is_right.any()):
        return y, known
    plain = y.double().masked_fill(any_is_right, 0.0)
    return plain, replace(known, y=known.y.masked_fill(any_is_right, 0.0))


def _elements(known: Reference, at: torch.Tensor) -> Reference:
    slack = known.slack
    return replace(
        known,
        y=known.y.reshape(-1)[at],
        magnitude=known.magnitude.reshape(-1)[at],
        slack=slack if isinstance(slack, float) else slack.reshape(-1)[at],
    )


def _copied(value: Value) -> Value:
    """The kernel's code gets a copy, so that it can't change what its reference is made of."""
    plain = None if value.plain is None else value.plain.clone()
    return Value(value.shape, value.number, plain, tuple(o.clone() for o in value.operands))

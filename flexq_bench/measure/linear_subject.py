"""A linear layer as the subject of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from flexq_bench.kernels.contract import Config, KernelSpec, PackedOperand
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import Reference, reference_of
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import CheckResult, check_linear
from flexq_bench.measure.given_inputs import Parts, linear_inputs
from flexq_bench.measure.inputs import (
    INPUT_DISTRIBUTION,
    LinearInputs,
    derive_seed,
    realistic_inputs,
    realistic_weight,
)
from flexq_bench.measure.linear_work import Launch, LinearWork, stage_input
from flexq_bench.measure.subject import CopiedSubject, check_packed, plain_operand
from flexq_bench.measure.weight_rotation import Content, LayerWeights
from flexq_bench.measure.work import Work


def layer_weights(bound: BoundKernel, seed: int, secret: int) -> LayerWeights:
    kernel, spec = bound.kernel, bound.spec
    n, k = bound.gemm.n, bound.gemm.k

    def draw(index: int) -> Content:
        # The first content is that of every process with this seed; the others are not known.
        parts = ("timed weights",) if index == 0 else ("timed weights", index, secret)
        operand = realistic_weight(kernel, n, k, bound.device, derive_seed(seed, n, k, *parts))
        packed = plain_operand(spec, kernel.pack_weight(operand.clone()))
        check_packed(spec, packed, _code_bytes(spec, operand), "weights")
        return Content(operand, packed)

    return LayerWeights(draw)


def _code_bytes(spec: KernelSpec, operand: Operand) -> int:
    return operand.rows * operand.k * spec.weight.bits // 8


class LinearSubject(CopiedSubject):
    input_distribution = INPUT_DISTRIBUTION

    def __init__(
        self, bound: BoundKernel, seed: int, rewriting: Rewriting, weights: LayerWeights
    ) -> None:
        super().__init__(bound.case, bound.device, rewriting, weights)
        self.spec = bound.spec
        self._bound, self._kernel = bound, bound.kernel
        drawn = derive_seed(seed, bound.gemm, "timed")
        w = self.first.operand
        self._inputs = realistic_inputs(bound.kernel, bound.gemm, bound.device, drawn, w=w)

    @cached_property
    def _reference(self) -> Reference:
        """The results of the inputs. Few launches need them if a judge has others."""
        return reference_of(self.spec, self._inputs.x, self.first.operand)

    @property
    def read_bytes(self) -> int | None:
        # An external kernel may pack bytes that no launch reads.
        return _code_bytes(self.spec, self.first.operand) if self.spec.is_external else None

    def candidates(self) -> Sequence[Config]:
        return self._kernel.candidates(self._bound.gemm)

    @property
    def tuning_bucket(self) -> int:
        return self._kernel.tuning_bucket(self._bound.gemm.m)

    def narrow(self, config: Config | None) -> None:
        self._weights = self._weights.repacked(
            lambda w: plain_operand(self.spec, self._kernel.narrow(w, config))
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

    def given(self, parts: Parts) -> LinearInputs:
        return linear_inputs(parts)

    def _work(self, seed: int) -> Work:
        launch, own = _launcher(self._bound), self._inputs
        return LinearWork(self._bound, launch, own, lambda: self._reference, self._rewriting, seed)


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

"""The launches of a linear layer, with references of some elements of their results."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flexq_bench.kernels.contract import Config, PackedOperand
from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.reference import Reference, reference_gemm
from flexq_bench.measure.activation_rotation import Rewriting
from flexq_bench.measure.bound_kernel import BoundKernel
from flexq_bench.measure.check import judge_error, relative_error
from flexq_bench.measure.inputs import (
    LinearInputs,
    derive_seed,
    quantized_activation,
    realistic_activations,
)
from flexq_bench.measure.weight_rotation import Content
from flexq_bench.measure.work import WRONG_UNANNOUNCED, KeptLaunches, Outputs, Work

# Elements with a known float64 result: this many tokens and output features.
_CHECKED_ROWS = 16
_CHECKED_COLUMNS = 128
# Contents of the weights whose launches are judged, of those of a placement's kept outputs.
_JUDGED_CONTENTS = 64

# launch(x, w, out, config) -> the output, if the kernel allocated it
Launch = Callable[[PackedOperand, PackedOperand, torch.Tensor, Config | None], torch.Tensor | None]


class LinearWork(Work):
    """own: the subject's own inputs. reference: returns that of those. seed: of activations like
    them, and of the elements of their results to check.
    """

    def __init__(
        self,
        bound: BoundKernel,
        launch: Launch,
        own: LinearInputs,
        reference: Callable[[], Reference],
        rewriting: Rewriting,
        seed: int,
    ) -> None:
        self._bound, self._launch, self._reference = bound, launch, reference
        gemm, device = bound.gemm, own.w.values.device
        host = torch.Generator().manual_seed(seed)
        self.rows, self.columns = (
            torch.randperm(size, generator=host, device="cpu")[:most].to(device)
            for size, most in ((gemm.m, _CHECKED_ROWS), (gemm.n, _CHECKED_COLUMNS))
        )
        flat = self.rows[:, None] * gemm.n + self.columns[None, :]
        self.elements = {"out": flat.flatten()}
        generator = torch.Generator(device).manual_seed(derive_seed(seed, "activations"))
        inputs: list[PackedOperand] = []
        self.x_rows: list[Operand] = []  # these rows of the inputs and of the unseen ones

        def add(x: LinearInputs) -> None:
            self.x_rows.append(x.x.take_rows(self.rows))  # first: packing runs the kernel's code
            inputs.append(self.stage(x))

        add(own)
        while len(inputs) <= rewriting.activation_contents(inputs[0]):  # one more, unseen
            x_real = realistic_activations(gemm, generator, bound.spec.input_dtype)
            add(LinearInputs(x_real, quantized_activation(bound.kernel, x_real), own.w))
        *self.inputs, self.unseen = inputs
        self.read_only = bound.kernel.read_only()
        if bound.case.stage == "linear":
            self.read_only |= {"x"}

    def allocate(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        gemm, dtype = self._bound.gemm, self._bound.spec.output_dtype
        noise = torch.randn(
            gemm.m, gemm.n, generator=generator, device=generator.device, dtype=torch.float32
        )
        return {"out": noise.to(dtype)}

    def launch(
        self, x: PackedOperand, w: PackedOperand, out: Outputs, config: Config | None
    ) -> Outputs | None:
        made = self._launch(x, w, out["out"], config)
        return None if made is None else {"out": made}

    def judge(self, outputs: Outputs, tolerance: float) -> str:
        return judge_error(outputs["out"], self._reference(), tolerance).detail

    def judge_kept(
        self, kept: KeptLaunches, draw: random.Random, tolerance: float
    ) -> tuple[str, int]:
        contents = list({id(w): w for w in kept.weights}.values())
        judged = {id(w) for w in draw.sample(contents, min(len(contents), _JUDGED_CONTENTS))}
        chosen = [i for i, w in enumerate(kept.weights) if id(w) in judged]
        kept = kept.chosen(chosen)
        y = kept.outputs["out"].view(-1, len(self.rows), len(self.columns))
        reference = self.reference([w.operand for w in kept.weights], kept.activations)
        wrong = ~(relative_error(y, reference) <= tolerance)  # true for NaN
        if not bool(wrong.any()):
            return "", 0
        launch, row, column = place = tuple(torch.nonzero(wrong)[0].tolist())
        problem = (
            f"{WRONG_UNANNOUNCED}: {int(wrong.sum()):,} of {wrong.numel():,} elements looked at "
            f"unannounced, first y[{int(self.rows[row])},{int(self.columns[column])}] = "
            f"{float(y[place]):.6g}, expected {float(reference.y[place]):.6g}"
        )
        return problem, chosen[launch]

    def reference(self, weights: Sequence[Operand], activations: Sequence[int]) -> Reference:
        """The checked elements of the results of launches.

        weights, activations: of each launch, W [N,K] and the index of the input. y and magnitude,
        the sum of all |products|, are [launches, rows, columns].
        """
        launches: dict[int, list[int]] = defaultdict(list)
        for i, w in enumerate(weights):
            launches[id(w)].append(i)
        count, rows, columns = len(weights), len(self.rows), len(self.columns)
        y = torch.empty(
            count, rows, columns, dtype=torch.float64, device=self.x_rows[0].values.device
        )
        magnitude = torch.empty_like(y)
        for indices in launches.values():
            used = sorted({activations[i] for i in indices})
            # A stale result differs by far. Rounding errors (of sums of single bit planes, for
            # example, which cancel if their total is small) are tolerated relative to all products
            # here; the announced checks judge rounding.
            exact = reference_gemm(
                Operand.stacked([self.x_rows[i] for i in used]),
                weights[indices[0]].take_rows(self.columns),
                integer_sums=False,
            )
            places = [used.index(activations[i]) for i in indices]
            y[indices] = exact.y.view(len(used), rows, columns)[places]
            magnitude[indices] = exact.magnitude.view(len(used), rows, columns)[places]
        of_all = replace(exact, y=y, magnitude=magnitude)
        return of_all.rounded_to(self._bound.spec.rounds_to).stored_as(self._bound.spec.output)

    def stage(self, inputs: LinearInputs) -> PackedOperand:
        """Return the input of a launch: packed codes, or `real` activations.

        The kernel's code gets a copy of the codes, so that it can't change what its reference is
        computed from. Raises ValueError if the stage needs real activations and there are none.
        """
        return stage_input(self._bound, inputs)

    def content(self, inputs: Any, config: Config | None) -> Content:
        packed = self._bound.kernel.pack_weight(inputs.w.clone())
        return Content(inputs.w, self._bound.kernel.narrow(packed, config))


def stage_input(bound: BoundKernel, inputs: LinearInputs) -> PackedOperand:
    """See LinearWork.stage."""
    if bound.case.stage == "gemm":
        return bound.kernel.pack_activation(inputs.x.clone())
    if inputs.x_real is None:
        raise ValueError("the linear stage needs real activations, these inputs are codes")
    return PackedOperand({"real": inputs.x_real}, bound.gemm.m, bound.gemm.k)

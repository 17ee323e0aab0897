"""GPTQ: rounding column by column; the error of each is compensated in the following columns.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323: the update is their equation 3, in the Cholesky form of section 3.3 (algorithm 1);
the damping is 1 % of the Hessian's mean diagonal (section 3.3, step 3). Which number format a group
is rounded to is the caller's choice: ZeroQuant(4+2) (arXiv 2312.08583) does the same with FP6 and
FP5 codes.

llm-compressor and optimum implement GPTQ only for integers, within their own model wrappers and
file formats. They offer neither FP6 nor FP5 nor Atom's two bit widths in one row, so the forty
lines of the algorithm are implemented here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats import (
    ColumnGroup,
    Kind,
    NumberFormat,
    Operand,
    Rounder,
    Scaling,
    assembled,
)
from flexq_bench.schemes.activations import dynamic
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of
from flexq_bench.schemes.uniform import FULL_BITS, uniform_format


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """Hyper-parameters of arXiv 2210.17323, section 3.3.

    damping:   fraction of the mean diagonal that is added to the Hessian's diagonal.
    block:     columns that are updated before the rest of the matrix is.
    act_order: round the columns with the largest Hessian diagonal first. Scales are then computed
               from the original weights, because the columns of a kernel's group stay adjacent.
    """

    damping: float = 0.01
    block: int = 128
    act_order: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf or self.block < 1:
            raise ValueError(
                f"damping must be above 0 and a block at least 1 column, got {self.damping} and "
                f"{self.block}"
            )


def gptq(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    number: NumberFormat,
    options: GptqOptions | None = None,
) -> Operand:
    """Quantize weights [N, K] to codes and scales; deterministic.

    hessian: [K, K], the sum (or mean: only ratios matter) of x xᵀ over the calibration tokens.
    number:  format of the codes.

    An input that is always zero in calibration (a zero on the diagonal) gets a unit Hessian; its
    weights are rounded to nearest. Raises ShapeError if the Hessian doesn't fit the weights, and
    ValueError if it isn't finite.
    """
    options = options or GptqOptions()
    k = weight.shape[1]
    if tuple(hessian.shape) != (k, k):
        raise ShapeError(
            f"weights with {k} inputs need a {k}x{k} Hessian, got {tuple(hessian.shape)}"
        )
    if not bool(torch.isfinite(hessian).all()):
        raise ValueError("the Hessian holds NaN or infinity: look at the calibration inputs")

    work = weight.double()
    groups = number.columns(k)
    scalings: list[Scaling] = []
    rounders: list[Rounder] = []

    def fit(group: ColumnGroup, columns: torch.Tensor) -> None:
        scalings.append(group.format.fit(columns))
        rounders.append(group.format.rounder(scalings[-1], columns.dtype))

    order = torch.arange(k, device=weight.device)
    if options.act_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
        for group in groups:
            fit(group, work[:, group.start : group.end])
    group_of = [index for index, g in enumerate(groups) for _ in range(g.start, g.end)]
    factor = _inverse_factor(hessian.double()[order][:, order], options.damping)
    work = work[:, order].contiguous()
    columns = order.tolist()
    codes = torch.empty_like(work, dtype=torch.float16)  # integers up to 255, or small floats

    for start in range(0, k, options.block):
        end = min(start + options.block, k)
        errors = torch.zeros_like(work[:, start:end])
        for j in range(start, end):
            group = groups[group_of[columns[j]]]
            if not options.act_order and j == group.start:
                # Columns of the group beyond this block are not updated by this block's errors yet.
                late = work[:, j : group.end].clone()
                late[:, end - j :] -= errors[:, : j - start] @ factor[start:j, end : group.end]
                fit(group, late)
            rounder = rounders[group_of[columns[j]]]
            code = rounder.codes(work[:, j : j + 1])
            codes[:, j] = code[:, 0]
            error = work[:, j] - rounder.values(code)[:, 0]
            error = torch.div(error, factor[j, j], out=errors[:, j - start])
            work[:, j:end].addr_(error, factor[j, j:end], alpha=-1)
        work[:, end:] -= errors @ factor[start:end, end:]
    restored = torch.empty_like(codes)
    restored[:, order] = codes
    return assembled(restored, scalings, number)


def gptq_together(
    weights: Sequence[torch.Tensor],
    hessian: torch.Tensor,
    number: NumberFormat,
    options: GptqOptions | None = None,
    *,
    order: torch.Tensor | None = None,
) -> list[Operand]:
    """Apply `gptq` to several weights [N, K] with the same inputs.

    Rows are independent, so the columns are processed once for all weights. order: [K], permutation
    of the operands' columns; None: that of the weights.
    """
    together = torch.cat(list(weights))
    if order is None:
        solved = gptq(together, hessian, number, options)
    else:
        solved = gptq(together[:, order], hessian[order][:, order], number, options)
        solved = replace(solved, order=order.to(torch.int32))
    return solved.split_rows([weight.shape[0] for weight in weights])


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Upper triangular U with UᵀU = (H + damping)⁻¹ (arXiv 2210.17323, section 3.3)."""
    diagonal = hessian.diagonal()
    damped = hessian + torch.diag(damping * diagonal.mean() + (diagonal == 0).double())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper


@dataclass(frozen=True, slots=True)
class GptqSchemeOptions(SchemeOptions):
    """GPTQ for every layer (arXiv 2210.17323, section 3.3 and the options of section 4).

    symmetric: signed codes; the paper's quantizer has a zero point.
    a_bits:    of activations, with a scale per token (or group); 16, as in the paper: weight-only.
    """

    w_bits: int
    a_bits: int = FULL_BITS
    group: int | None = 128
    symmetric: bool = False
    act_order: bool = False
    damping: float = 0.01

    def __post_init__(self) -> None:
        GptqOptions(damping=self.damping)  # raises with the reason

    @property
    def weight(self) -> NumberFormat:
        kind: Kind = "symmetric" if self.symmetric else "asymmetric"
        return NumberFormat(self.w_bits, self.group, kind)

    @property
    def activation(self) -> NumberFormat:
        return uniform_format(self.a_bits, self.group)


class Gptq(Scheme):
    """Integer weights by GPTQ, block by block, on the inputs of the partly quantized model."""

    source = "GPTQ, arXiv:2210.17323, section 3.3"
    options: GptqSchemeOptions
    needs_calibration = True

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        options = self.options
        solver = GptqOptions(damping=options.damping, act_order=options.act_order)
        statistics = Statistics(hessian=True)
        observe_block(state, block, statistics)
        for site_input in state.layout.inputs_of(block):
            readers = readers_of(state, block, site_input)
            weights = [weight_of(state.model, site) for site in readers]
            hessian = statistics.hessian[readers[0].name]
            solved = gptq_together(weights, hessian, options.weight, solver)
            for site, rounded in zip(readers, solved, strict=True):
                quantize_site(state.model, site, rounded, dynamic(options.activation))

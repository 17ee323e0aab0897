"""AutoRound: rounding and ranges of weights, learned by signed gradients.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs",
arXiv 2309.05516: a weight is rounded after an offset of at most half a code is added (equation 3),
and a group's range is multiplied by a share (equations 4 and 5); both follow the sign of their
gradients, with a rate of 1 / steps that decreases linearly (section 3.1, algorithm 1). Here the
loss is that of each layer's output instead of a block's, which needs only the moments of its input,
and the best step of each row is kept, the first of which rounds to nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import NumberFormat, Operand, Scaling, assembled
from flexq_bench.kernels.formats.grouping import in_groups
from flexq_bench.schemes.calibration import Statistics
from flexq_bench.schemes.fake_quantization import quantize_site
from flexq_bench.schemes.model_map import weight_of
from flexq_bench.schemes.scheme import QuantizationState, Scheme, SchemeOptions
from flexq_bench.schemes.site_inputs import observe_block, readers_of

_MOST_OFFSET, _LEAST_SHARE = 0.5, 0.1  # codes; of a group's range


@dataclass(frozen=True, slots=True)
class AutoRoundOptions(SchemeOptions):
    """steps: of the descent; 0: to nearest. Raises ValueError for fewer, or an empty group."""

    w_bits: int
    group: int | None = 128
    steps: int = 200

    def __post_init__(self) -> None:
        if self.steps < 0 or (self.group is not None and self.group < 1):
            raise ValueError(f"steps are 0 or more, in groups of 1 or more: {self.steps}")

    @property
    def weight(self) -> NumberFormat:
        return NumberFormat(self.w_bits, self.group)


class AutoRound(Scheme):
    """Symmetric integers whose rounding and ranges are learned layer by layer."""

    source = "SignRound, arXiv:2309.05516, section 3.1, with the loss of each layer"
    options: AutoRoundOptions

    @property
    def needs_calibration(self) -> bool:
        return True

    def quantize_block(self, state: QuantizationState, block: int) -> None:
        statistics = Statistics(hessian=True)
        observe_block(state, block, statistics)
        for site_input in state.layout.inputs_of(block):
            readers = readers_of(state, block, site_input)
            moments = statistics.hessian[readers[0].name]
            weights = torch.cat([weight_of(state.model, site) for site in readers])
            solved = learned_rounding(weights, moments, self.options.weight, self.options.steps)
            parts = solved.split_rows([site.n for site in readers])
            for site, rounded in zip(readers, parts, strict=True):
                quantize_site(state.model, site, rounded)


def learned_rounding(
    weight: torch.Tensor, moments: torch.Tensor, number: NumberFormat, steps: int
) -> Operand:
    """Quantize weights [N, K] for the least error of W x; deterministic.

    moments: [K, K], the sum of x xᵀ over the calibration tokens. number: symmetric integers.
    """
    rows, k = weight.shape
    grouped = in_groups(weight.detach().float(), number.group)
    largest, (low, high) = grouped.abs().amax(-1, keepdim=True), number.limits
    scaled = moments.float().to(grouped.device)
    scaled = scaled / scaled.diagonal().mean().clamp(min=1e-30)
    offset = torch.zeros_like(grouped, requires_grad=True)
    share = torch.ones_like(largest, requires_grad=True)
    best = torch.full((rows,), torch.inf, device=grouped.device)
    kept = offset.detach().clone(), share.detach().clone()
    for step in range(steps + 1):
        codes, scales = _rounded(grouped, largest, offset, share, low, high)
        error = (codes * scales - grouped).view(rows, -1)[:, :k]
        losses = ((error @ scaled) * error).sum(1)
        better = losses.detach() < best
        best = torch.where(better, losses.detach(), best)
        chosen = better[:, None, None]
        kept = (
            torch.where(chosen, offset.detach(), kept[0]),
            torch.where(chosen, share.detach(), kept[1]),
        )
        if step == steps:
            break
        of_offset, of_share = torch.autograd.grad(losses.sum(), (offset, share))
        rate = (1 - step / steps) / steps
        with torch.no_grad():
            offset.sub_(rate * of_offset.sign()).clamp_(-_MOST_OFFSET, _MOST_OFFSET)
            share.sub_(rate * of_share.sign()).clamp_(_LEAST_SHARE, 1.0)
    with torch.no_grad():
        codes, scales = _rounded(grouped, largest, *kept, low, high)
    of_groups = [Scaling(scale[:, :1].half()) for scale in scales.unbind(1)]
    return assembled(codes.view(rows, -1)[:, :k].to(weight.device), of_groups, number)


def _rounded(
    grouped: torch.Tensor,
    largest: torch.Tensor,
    offset: torch.Tensor,
    share: torch.Tensor,
    low: int,
    high: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and FP16 scales, in FP32; gradients pass straight through both roundings."""
    exact = largest * share / high
    scales = exact + (exact.half().float() - exact).detach()
    shifted = grouped / scales.masked_fill(scales == 0, torch.inf) + offset
    codes = shifted + (shifted.round() - shifted).detach()
    return codes.clamp(low, high), scales

"""Search for dual-grained weights: scales of groups and of rows, of 4 bits (DGQ) and of 6.

Zhang et al., "Dual Grained Quantization", arXiv 2310.04836. Section 3.3 searches in two phases:
first the real scale S' and zero point of each group on its own, then S1 of each row with S2 =
round(S' / S1). Both minimise the squared error of the layer's output. The format is
`kernels.formats.dual_grained`. In `search_six_bits` a group can only choose from the integers 1 to
4, so phase 1 is repeated for each row scale of phase 2.

No library has this format: AutoGPTQ, llm-compressor and optimum store one real scale per group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexq_bench.kernels.formats import Operand
from flexq_bench.kernels.formats.dual_grained import (
    CODE_BITS,
    LARGEST_INT8,
    LARGEST_SIX_BIT_PRODUCT,
    SIX_BITS,
    TOP_CODE,
    TOP_SIX_BIT_SCALE,
    six_bit_codes,
)
from flexq_bench.kernels.formats.grouping import in_groups, safe_divisor
from flexq_bench.kernels.formats.symmetric_quantization import scales_to


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Grids of the two phases, descending. One share of 1: no search.

    group_shares:  of a group's range, phase 1.
    row_shares:    of a row's largest weight, phase 2.
    """

    group_shares: tuple[float, ...]
    row_shares: tuple[float, ...]

    @classmethod
    def of_steps(cls, group_steps: int = 20, row_steps: int = 80) -> SearchOptions:
        """Evenly spaced grids down to 0.8 of a group's range and 0.2 of a row's largest weight.

        The paper gives no grids; these are the ones of the authors' published code.
        """
        return cls(
            tuple(1 - 0.2 * i / (group_steps - 1) for i in range(group_steps)),
            tuple(1 - 0.8 * i / (row_steps - 1) for i in range(row_steps)),
        )


def search_dual_grained(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    group: int = 128,
    options: SearchOptions | None = None,
) -> Operand:
    """Quantize weights [N, K] for inputs with the second moments `hessian` [K, K], Σ x xᵀ.

    Deterministic: the largest share wins a tie. Raises ValueError if FP16 can't represent a scale.
    """
    options = options or SearchOptions.of_steps()
    work, moments = weight.float(), hessian.to(weight.device).float()
    scales, zero_points = _search_groups(work, moments, group, options.group_shares)
    return _search_rows(work, moments, scales, zero_points, group, options.row_shares)


def search_groups(
    weight: torch.Tensor, hessian: torch.Tensor, group: int | None, options: SearchOptions
) -> Operand:
    """Return the codes of phase 1 alone, with its real scales. group None: all of a row."""
    work, moments = weight.float(), hessian.to(weight.device).float()
    k = work.shape[1]
    size = k if group is None else group
    scales, zero_points = _search_groups(work, moments, size, options.group_shares)
    scales = scales.half()
    steps = _per_column(safe_divisor(scales.float(), work.dtype), size, k)
    codes = (torch.round(work / steps) - _per_column(zero_points, size, k)).clamp(0, TOP_CODE)
    return Operand(
        codes.to(torch.int8), scales, CODE_BITS, group, zero_points.to(torch.int8).contiguous()
    )


def search_six_bits(
    weight: torch.Tensor,
    hessian: torch.Tensor | None,
    group: int,
    row_shares: tuple[float, ...],
) -> Operand:
    """Quantize weights [N, K] to codes of 6 bits, for the least error of the layer's output.

    hessian: second moments of the inputs, [K, K], Σ x xᵀ; None: for the least error of the weights.
    row_shares: candidates for the range of a row, as shares of its largest weight; the range is 124
    times the row's scale. Deterministic: the first of equal candidates wins. Raises ValueError if
    FP16 can't represent a scale.
    """
    work = weight.float()
    moments = None if hessian is None else hessian.to(weight.device).float()
    blocks = in_groups(work, group).transpose(0, 1)  # [groups, N, group]: padding is exact
    local = None
    if moments is not None:
        local = torch.stack([part[:, i] for i, part in enumerate(_square(moments, group))])
    largest = work.abs().amax(dim=1, keepdim=True)
    best = _Best.of(largest)
    for share in row_shares:
        row_scale = scales_to(largest, LARGEST_SIX_BIT_PRODUCT, share).float()
        scales, codes = _best_groups(blocks, local, row_scale)
        values = _rows_of(codes * scales, work.shape[1])
        best.offer(_error(work - values * row_scale, moments), row_scale, row_scale)
    scales, codes = _best_groups(blocks, local, best.first)
    return Operand(
        _rows_of(codes, work.shape[1]).to(torch.int8).contiguous(),
        scales.squeeze(2).T.half().contiguous(),
        SIX_BITS,
        group,
        row_scales=best.first.half(),
    )


def _rows_of(blocks: torch.Tensor, k: int) -> torch.Tensor:
    """Groups [groups, N, group] as a matrix [N, K], without its padding."""
    return blocks.transpose(0, 1).flatten(1)[:, :k]


def _best_groups(
    blocks: torch.Tensor, local: torch.Tensor | None, row_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Phase 1: scales S2 [groups, N, 1] and codes [groups, N, group], given each row's scale."""
    units = blocks / safe_divisor(row_scale, blocks.dtype)
    best = _Best.of(units[..., :1])
    for scale in range(1, TOP_SIX_BIT_SCALE + 1):
        s2 = torch.full_like(best.first, scale)
        best.offer(_error(units - six_bit_codes(units, s2) * s2, local), s2, s2)
    return best.first, six_bit_codes(units, best.first)


def _search_groups(
    weight: torch.Tensor, moments: torch.Tensor, group: int, shares: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Phase 1: real scales S' and zero points, each [N, groups]."""
    blocks = in_groups(weight, group).transpose(0, 1)  # [groups, N, group]: padding is exact
    local = torch.stack([part[:, i] for i, part in enumerate(_square(moments, group))])
    top = blocks.amax(dim=2, keepdim=True).clamp(min=0)
    bottom = blocks.amin(dim=2, keepdim=True).clamp(max=0)
    best = _Best.of(top)
    for share in shares:
        scale = (top - bottom) * share / TOP_CODE
        divisor = safe_divisor(scale, blocks.dtype)
        zero_point = torch.round(bottom * share / divisor).clamp(-TOP_CODE, 0)
        codes = (torch.round(blocks / divisor) - zero_point).clamp(0, TOP_CODE)
        values = (codes + zero_point) * scale
        best.offer(_error(blocks - values, local), scale, zero_point)
    return best.first.squeeze(2).T, best.second.squeeze(2).T


def _square(moments: torch.Tensor, group: int) -> torch.Tensor:
    """Return [K, K] as [groups, group, groups, group], zero-padded if the last group is shorter."""
    missing = -moments.shape[0] % group
    padded = torch.nn.functional.pad(moments, (0, missing, 0, missing))
    groups = padded.shape[0] // group
    return padded.view(groups, group, groups, group)


def _search_rows(
    weight: torch.Tensor,
    moments: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor,
    group: int,
    shares: tuple[float, ...],
) -> Operand:
    """Phase 2: find the row scale S1, which determines S2 and the codes."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    best = _Best.of(largest)
    for share in shares:
        row_scale = scales_to(largest, LARGEST_INT8, share).float()
        group_scale = _group_scale(scales, row_scale)
        values = _shifted_codes(weight, row_scale, group_scale, zero_points, group)
        values *= _per_column(group_scale, group, weight.shape[1])
        error = _error(weight - values * row_scale, moments)
        best.offer(error, row_scale, row_scale)
    row_scale = best.first
    group_scale = _group_scale(scales, row_scale)
    shifted = _shifted_codes(weight, row_scale, group_scale, zero_points, group)
    return Operand(
        (shifted - _per_column(zero_points, group, weight.shape[1])).to(torch.int8),
        group_scale.half(),
        CODE_BITS,
        group,
        zero_points.to(torch.int8).contiguous(),
        row_scales=row_scale.half(),
    )


def _group_scale(scales: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    return torch.round(scales / safe_divisor(row_scale, scales.dtype)).clamp(1, LARGEST_INT8)


def _shifted_codes(
    weight: torch.Tensor,
    row_scale: torch.Tensor,
    group_scale: torch.Tensor,
    zero_points: torch.Tensor,
    group: int,
) -> torch.Tensor:
    """Codes plus their zero point [N, K], limited so that their product with S2 is within ±127."""
    k = weight.shape[1]
    reach = torch.floor(LARGEST_INT8 / group_scale)
    highest = _per_column(torch.minimum(TOP_CODE + zero_points, reach), group, k)
    lowest = _per_column(torch.maximum(zero_points, -reach), group, k)
    step = _per_column(safe_divisor(group_scale * row_scale, weight.dtype), group, k)
    return torch.minimum(torch.maximum(torch.round(weight / step), lowest), highest)


def _per_column(per_group: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """[N, groups] as [N, K]."""
    return per_group.repeat_interleave(group, dim=1)[:, :k]


def _error(difference: torch.Tensor, moments: torch.Tensor | None) -> torch.Tensor:
    """Squared error of each output, [..., N, 1]: d H dᵀ for each row d of difference.

    moments None: of the weights of a row.
    """
    weighted = difference if moments is None else difference @ moments
    return (weighted * difference).sum(dim=-1, keepdim=True)


@dataclass(slots=True)
class _Best:
    """Elementwise smallest error so far, with two values that belong to it."""

    error: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def of(cls, like: torch.Tensor) -> _Best:
        """Create an empty one with the shape, dtype and device of `like`."""
        nothing = torch.zeros_like(like)
        return cls(torch.full_like(nothing, torch.inf), nothing, nothing)

    def offer(self, error: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.first = torch.where(better, first, self.first)
        self.second = torch.where(better, second, self.second)

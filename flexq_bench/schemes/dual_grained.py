"""DGQ's search for dual-grained weights: 4-bit groups that lift to INT8, one real scale a row.

Zhang et al., "Dual Grained Quantization", arXiv 2310.04836, section 3.2:
W_s8 = S2 · (W_u4 − zero), with an INT8 scale S2 for each group, so that one INT8 product covers all
of K, and W ≈ s1 · W_s8 with an FP16 scale s1 for each row. Section 3.3 searches in two phases: each
group's real scale S' and zero point for itself, then each row's s1 with S2 = round(S' / s1). Both
minimise the squared error of the layer's output.

No library has this format: AutoGPTQ, llm-compressor and optimum know one real scale a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.formats.grouping import in_groups, safe_divisor
from kernels.formats.symmetric_quantization import scales_to

_LARGEST_U4 = 15
_LARGEST_S8 = 127


@dataclass(frozen=True, slots=True)
class DualGrained:
    """Weights [N, K] as the kernel reads them.

    codes:       uint8 [N, K], 0 … 15.
    zeros:       uint8 [N, groups], 0 … 15.
    group_scale: int8 [N, groups], 1 … 127 (S2).
    row_scale:   float16 [N, 1] (s1).
    group:       values of k in a group; the last may be shorter.
    """

    codes: torch.Tensor
    zeros: torch.Tensor
    group_scale: torch.Tensor
    row_scale: torch.Tensor
    group: int

    def lifted(self) -> torch.Tensor:
        """W_s8, int32 [N, K]: what goes into the INT8 product, within ±127."""
        k = self.codes.shape[1]
        return _per_column(self.group_scale.int(), self.group, k) * (
            self.codes.int() - _per_column(self.zeros.int(), self.group, k)
        )

    def dequantize(self) -> torch.Tensor:
        """The real weights, float64 [N, K], exact."""
        return self.lifted().double() * self.row_scale.double()


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
        """From all of the range down to 0.8 of a group's and 0.2 of a row's, in even steps.

        The paper gives no grids; these are the ones of the authors' published code.
        """
        return cls(
            tuple(1 - 0.2 * i / (group_steps - 1) for i in range(group_steps)),
            tuple(1 - 0.8 * i / (row_steps - 1) for i in range(row_steps)),
        )


PLAIN = SearchOptions(group_shares=(1.0,), row_shares=(1.0,))
"""Two-level rounding without a search: what the two-phase search is compared with."""


def dual_grained(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    group: int = 128,
    options: SearchOptions | None = None,
) -> DualGrained:
    """Quantize weights [N, K] for inputs with the second moments `hessian` [K, K], Σ x xᵀ.

    Deterministic: the largest share wins a tie. Raises ValueError if FP16 can't carry a scale.
    """
    options = options or SearchOptions.of_steps()
    work, moments = weight.float(), hessian.to(weight.device).float()
    scales, zeros = _search_groups(work, moments, group, options.group_shares)
    return _search_rows(work, moments, scales, zeros, group, options.row_shares)


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
        scale = (top - bottom) * share / _LARGEST_U4
        divisor = safe_divisor(scale, blocks.dtype)
        zero = torch.round(-bottom * share / divisor).clamp(0, _LARGEST_U4)
        codes = (torch.round(blocks / divisor) + zero).clamp(0, _LARGEST_U4)
        best.offer(_output_error(blocks - (codes - zero) * scale, local), scale, zero)
    return best.first.squeeze(2).T, best.second.squeeze(2).T


def _square(moments: torch.Tensor, group: int) -> torch.Tensor:
    """[K, K] as [groups, group, groups, group], zeros where the last group is shorter."""
    missing = -moments.shape[0] % group
    padded = torch.nn.functional.pad(moments, (0, missing, 0, missing))
    groups = padded.shape[0] // group
    return padded.view(groups, group, groups, group)


def _search_rows(
    weight: torch.Tensor,
    moments: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
    shares: tuple[float, ...],
) -> DualGrained:
    """Phase 2: the row scale s1; S2 and the codes follow from it."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    best = _Best.of(largest)
    for share in shares:
        row_scale = scales_to(largest, _LARGEST_S8, share).float()
        group_scale = _group_scale(scales, row_scale)
        lifted = _signed_codes(weight, row_scale, group_scale, zeros, group)
        lifted *= _per_column(group_scale, group, weight.shape[1])
        error = _output_error(weight - lifted * row_scale, moments)
        best.offer(error, row_scale, row_scale)
    row_scale = best.first
    group_scale = _group_scale(scales, row_scale)
    signed = _signed_codes(weight, row_scale, group_scale, zeros, group)
    return DualGrained(
        (signed + _per_column(zeros, group, weight.shape[1])).to(torch.uint8),
        zeros.to(torch.uint8),
        group_scale.to(torch.int8),
        row_scale.to(torch.float16),
        group,
    )


def _group_scale(scales: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    return torch.round(scales / safe_divisor(row_scale, scales.dtype)).clamp(1, _LARGEST_S8)


def _signed_codes(
    weight: torch.Tensor,
    row_scale: torch.Tensor,
    group_scale: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
) -> torch.Tensor:
    """Codes less their zero [N, K], limited so that the lifted value stays within ±127.

    Otherwise the INT8 product would wrap.
    """
    k = weight.shape[1]
    reach = torch.floor(_LARGEST_S8 / group_scale)
    highest = _per_column(torch.minimum(_LARGEST_U4 - zeros, reach), group, k)
    lowest = _per_column(torch.maximum(-zeros, -reach), group, k)
    step = _per_column(safe_divisor(group_scale * row_scale, weight.dtype), group, k)
    return torch.minimum(torch.maximum(torch.round(weight / step), lowest), highest)


def _per_column(per_group: torch.Tensor, group: int, k: int) -> torch.Tensor:
    """[N, groups] as [N, K]."""
    return per_group.repeat_interleave(group, dim=1)[:, :k]


def _output_error(difference: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Squared error of each output, [..., N, 1]: d H dᵀ for each row d of difference."""
    return ((difference @ moments) * difference).sum(dim=-1, keepdim=True)


@dataclass(slots=True)
class _Best:
    """For each error, the two values that came with the smallest one so far."""

    error: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor

    @classmethod
    def of(cls, like: torch.Tensor) -> _Best:
        """None so far, in the shape, dtype and place of `like`."""
        nothing = torch.zeros_like(like)
        return cls(torch.full_like(nothing, torch.inf), nothing, nothing)

    def offer(self, error: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.first = torch.where(better, first, self.first)
        self.second = torch.where(better, second, self.second)

"""Triton kernels of training, in a separate file because Triton reads its source.

round_forward and round_backward compute `straight_through`; divergence and divergence_backward
compute `losses.attention_divergence`. Those modules contain the formulas of the gradients.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton resolves each annotation of a kernel as a value of its own language.

import triton
import triton.language as tl

from flexq_bench.kernels.formats.triton_rounding import codes_of, scale_of


@triton.jit
def _share_of(shares_pointer, row, rows, groups, clip, shared: tl.constexpr):
    """Share of a group's range that its codes span: clip times the learned share, if any."""
    share = tl.full(row.shape, 1.0, tl.float32)
    if shared:
        place = row.to(tl.int64) * groups + tl.program_id(1)
        share = tl.load(shares_pointer + place, mask=row < rows, other=1.0)
    return share * clip


@triton.jit
def round_forward(
    x_pointer,
    shares_pointer,
    rounded_pointer,
    rows,
    k,
    groups,
    clip,
    highest,
    lowest,
    shared: tl.constexpr,
    length: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
):
    """Round a group of several rows of x [rows, K]: code times scale."""
    row = tl.program_id(0) * together + tl.arange(0, together)
    place = tl.arange(0, block)
    column = tl.program_id(1) * length + place
    inside = (row < rows)[:, None] & ((place < length) & (column < k))[None, :]
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    x = tl.load(x_pointer + at, mask=inside, other=0.0)
    share = _share_of(shares_pointer, row, rows, groups, clip, shared)
    scale = scale_of(tl.max(tl.abs(x), axis=1), share, highest)
    _, _, code = codes_of(x, scale, lowest, highest, together, block)
    tl.store(rounded_pointer + at, code * scale[:, None], mask=inside)


@triton.jit
def round_backward(
    x_pointer,
    shares_pointer,
    gradient_pointer,
    to_x_pointer,
    to_shares_pointer,
    rows,
    k,
    groups,
    clip,
    highest,
    lowest,
    shared: tl.constexpr,
    length: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
):
    """Compute the gradients of x and of the shares; codes and scales are recomputed."""
    row = tl.program_id(0) * together + tl.arange(0, together)
    place = tl.arange(0, block)
    column = tl.program_id(1) * length + place
    inside = (row < rows)[:, None] & ((place < length) & (column < k))[None, :]
    at = row.to(tl.int64)[:, None] * k + column[None, :]
    x = tl.load(x_pointer + at, mask=inside, other=0.0)
    gradient = tl.load(gradient_pointer + at, mask=inside, other=0.0)
    largest = tl.max(tl.abs(x), axis=1)
    share = _share_of(shares_pointer, row, rows, groups, clip, shared)
    scale = scale_of(largest, share, highest)
    quotient, nearest, code = codes_of(x, scale, lowest, highest, together, block)
    passed = (nearest == code) & (scale != 0.0)[:, None]
    within = tl.where(passed, gradient, 0.0)
    to_reach = tl.sum(gradient * code - within * quotient, axis=1) / highest
    if shared:
        group = row.to(tl.int64) * groups + tl.program_id(1)
        tl.store(to_shares_pointer + group, to_reach * (largest * clip), mask=row < rows)
    is_largest = (tl.abs(x) == largest[:, None]) & inside
    count = tl.maximum(tl.sum(is_largest.to(tl.float32), axis=1), 1.0)
    sign = tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
    to_largest = tl.where(is_largest, sign * (to_reach * share / count)[:, None], 0.0)
    tl.store(to_x_pointer + at, within + to_largest, mask=inside)


@triton.jit
def divergence(ours_pointer, theirs_pointer, part_pointer, count, tiny, block: tl.constexpr):
    """Sum (p - q) (log p - log q) over a block of probabilities."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    ours = tl.load(ours_pointer + at, mask=at < count, other=0.0)
    theirs = tl.load(theirs_pointer + at, mask=at < count, other=0.0)
    ratio = tl.log(ours + tiny) - tl.log(theirs + tiny)
    tl.store(part_pointer + tl.program_id(0), tl.sum((ours - theirs) * ratio, axis=0))


@triton.jit
def divergence_backward(
    ours_pointer,
    theirs_pointer,
    factor_pointer,
    to_ours_pointer,
    count,
    tiny,
    block: tl.constexpr,
):
    """Compute the derivative of that sum by p, times the number at `factor`."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    ours = tl.load(ours_pointer + at, mask=at < count, other=0.0)
    theirs = tl.load(theirs_pointer + at, mask=at < count, other=0.0)
    ratio = tl.log(ours + tiny) - tl.log(theirs + tiny)
    slope = ratio + (ours - theirs) / (ours + tiny)
    tl.store(to_ours_pointer + at, tl.load(factor_pointer) * slope, mask=at < count)

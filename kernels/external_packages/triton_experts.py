"""The program of `triton-experts` (experts.py), in a file of its own: Triton parses it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton resolves each annotation of a kernel as a value of its own language.

import torch
import triton
import triton.language as tl


@triton.jit
def _experts(
    x,
    w,
    sizes,
    y,
    n,
    k,
    experts,
    rows_apart,
    listed: tl.constexpr,
    tokens: tl.constexpr,
    features: tl.constexpr,
    depth: tl.constexpr,
):
    """One block of tokens of an expert, and a block of its features."""
    of_list = tl.arange(0, listed)
    size = tl.load(sizes + of_list, of_list < experts, 0)
    blocks = (size + tokens - 1) // tokens
    ends = tl.cumsum(blocks)
    item = tl.program_id(1)
    if item < tl.sum(blocks):
        expert = tl.sum((ends <= item).to(tl.int32))
        earlier = of_list < expert
        own = of_list == expert
        block = item - tl.sum(tl.where(earlier, blocks, 0))
        first = tl.sum(tl.where(earlier, size, 0))
        if rows_apart > 0:
            first = expert * rows_apart
        row = block * tokens + tl.arange(0, tokens)
        has_row = row < tl.sum(tl.where(own, size, 0))
        rows = (first + row).to(tl.int64)
        feature = tl.program_id(0) * features + tl.arange(0, features)
        has_feature = feature < n
        of_expert = w + expert.to(tl.int64) * n * k
        sums = tl.zeros((tokens, features), tl.float32)
        for start in range(0, k, depth):
            at = start + tl.arange(0, depth)
            inside = at < k
            of_x = tl.load(
                x + rows[:, None] * k + at[None, :], has_row[:, None] & inside[None, :], 0
            )
            of_w = tl.load(
                of_expert + feature[None, :] * k + at[:, None],
                has_feature[None, :] & inside[:, None],
                0,
            )
            sums = tl.dot(of_x, of_w, sums)
        tl.store(
            y + rows[:, None] * n + feature[None, :],
            sums.to(y.dtype.element_ty),
            has_row[:, None] & has_feature[None, :],
        )


def run(
    x: torch.Tensor,
    w: torch.Tensor,
    sizes: torch.Tensor,
    y: torch.Tensor,
    rows_apart: int,
    tokens: int,
    features: int,
    stages: int,
) -> None:
    """Compute y[rows of e] = x[rows of e] · w[e]^T. tokens, features: of a program."""
    experts, n, k = w.shape
    items = len(x) // tokens + experts  # at most so many blocks of tokens
    if not rows_apart:
        items = min(items, len(x))
    _experts[triton.cdiv(n, features), items](
        x,
        w,
        sizes,
        y,
        n,
        k,
        experts,
        rows_apart,
        triton.next_power_of_2(experts),
        tokens,
        features,
        64,
        num_stages=stages,
    )

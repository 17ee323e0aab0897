# ruff: noqa: N803
"""W6A8 and W4A16 in Triton: a program computes 64 output features of up to 16 tokens."""

import triton
import triton.language as tl
from torch.nn.functional import pad

from flexq_bench.api import linear_kernel

GROUP = 128
PADDING_PERCENT = 0  # of the groups: zeros that follow them in the weights and are read
ROOM_PERCENT = 20  # for them, so that rows begin at the same places whatever is read
SIGN = 1


@triton.jit
def w6a8_kernel(x, xs, w, ws, y, M, N, K, KW, READ, SIGN: tl.constexpr, BN: tl.constexpr):
    rows, columns = tl.program_id(1) * 16 + tl.arange(0, 16), tl.program_id(0) * BN
    features, steps = columns + tl.arange(0, BN), tl.arange(0, 128)
    groups, groups_w = tl.cdiv(K, 128), tl.cdiv(KW, 128)
    total = tl.zeros((16, BN), tl.float32)
    for group in range(tl.cdiv(READ, 128)):
        k = group * 128 + steps
        a = tl.load(
            x + rows[:, None] * K + k[None, :],
            mask=(rows[:, None] < M) & (k[None, :] < K),
            other=0,
        )
        b = tl.load(
            w + features[None, :] * KW + k[:, None],
            mask=(features[None, :] < N) & (k[:, None] < KW),
            other=0,
        )
        of_rows = tl.load(
            xs + rows * groups + group, mask=(rows < M) & (group < groups), other=0.0
        ).to(tl.float32)
        of_features = tl.load(ws + features * groups_w + group, mask=features < N, other=0.0)
        sums = tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)
        total += sums * of_rows[:, None] * of_features.to(tl.float32)[None, :]
    to = y + rows[:, None] * N + features[None, :]
    tl.store(to, SIGN * total, mask=(rows[:, None] < M) & (features[None, :] < N))


@triton.jit
def w4a16_kernel(x, w, ws, y, M, N, K, KW, READ, BN: tl.constexpr):
    rows, columns = tl.program_id(1) * 16 + tl.arange(0, 16), tl.program_id(0) * BN
    features, steps = columns + tl.arange(0, BN), tl.arange(0, 128)
    groups_w = tl.cdiv(KW, 128)
    total = tl.zeros((16, BN), tl.float32)
    for group in range(tl.cdiv(READ, 128)):
        k = group * 128 + steps
        a = tl.load(
            x + rows[:, None] * K + k[None, :],
            mask=(rows[:, None] < M) & (k[None, :] < K),
            other=0.0,
        )
        b = tl.load(
            w + features[None, :] * KW + k[:, None],
            mask=(features[None, :] < N) & (k[:, None] < KW),
            other=0,
        )
        of_features = tl.load(ws + features * groups_w + group, mask=features < N, other=0.0)
        sums = tl.dot(a, b.to(tl.float16), out_dtype=tl.float32)
        total += sums * of_features.to(tl.float32)[None, :]
    to = y + rows[:, None] * N + features[None, :]
    tl.store(to, total, mask=(rows[:, None] < M) & (features[None, :] < N))


def padded(codes, scales):
    """Codes and scales of weights with groups of zeros behind them."""
    groups = codes.shape[1] // GROUP * max(PADDING_PERCENT, ROOM_PERCENT) // 100
    return pad(codes, (0, groups * GROUP)), pad(scales, (0, groups))


def launch(kernel, operands, k, k_w, out, *constants):
    """k: input features of x. k_w: those of a row of w, with zeros."""
    m, n = out.shape
    read = k + k // GROUP * PADDING_PERCENT // 100 * GROUP
    grid = (triton.cdiv(n, 64), triton.cdiv(m, 16))
    kernel[grid](*operands, out, m, n, k, k_w, read, *constants, BN=64)


@linear_kernel(
    "triton-w6a8",
    weight="int6/128",
    activation="int8/128",
    backends=["cuda"],
    prepare_weight=padded,
)
def w6a8(x_codes, x_scales, w_codes, w_scales, out):
    """W6A8: int8 tensor core, scales after each group."""
    arguments = (x_codes, x_scales, w_codes, w_scales)
    launch(w6a8_kernel, arguments, x_codes.shape[1], w_codes.shape[1], out, SIGN)


@linear_kernel("triton-w4a16", weight="int4/128", backends=["cuda"], prepare_weight=padded)
def w4a16(x, w_codes, w_scales, out):
    """W4A16: codes as FP16 numbers, scales after each group."""
    launch(w4a16_kernel, (x, w_codes, w_scales), x.shape[1], w_codes.shape[1], out)

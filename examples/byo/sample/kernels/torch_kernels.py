"""W6A8 and W4A16 in torch, on a CPU as on a GPU."""

import torch

from flexq_bench.api import linear_kernel

GROUP = 128
AGAIN_PERCENT = 0  # of the output features, computed twice
SIGN = 1


def dequantized(codes, scales):
    """Codes [rows, K] as FP32 numbers."""
    wide = scales.float().repeat_interleave(GROUP, 1)
    return codes.float() * wide[:, : codes.shape[1]]


def write(x, w, out):
    """out = x · w^T, [M,K] and [N,K]."""
    out.copy_(torch.mm(x, w.T))
    again = out.shape[1] * AGAIN_PERCENT // 100
    if again:
        out[:, :again] = torch.mm(x, w[:again].T)


@linear_kernel("torch-w6a8", weight="int6/128", activation="int8/128", prepare_weight=dequantized)
def w6a8(x_codes, x_scales, w, out):
    """W6A8: codes as FP32 numbers."""
    write(dequantized(x_codes, x_scales), SIGN * w, out)


@linear_kernel("torch-w4a16", weight="int4/128", prepare_weight=dequantized)
def w4a16(x, w, out):
    """W4A16: weights as FP32 numbers."""
    write(x.float(), w, out)

"""W6A8 and W4A16 in torch, on a CPU as on a GPU."""

import torch

from flexq_bench.api import linear_kernel

GROUP = 128
PADDING_PERCENT = 0  # of the input features: zeros that follow them in the weights
SIGN = 1


def dequantized(codes, scales):
    """Codes [rows, K] as FP32 numbers."""
    wide = scales.float().repeat_interleave(GROUP, 1)
    return codes.float() * wide[:, : codes.shape[1]]


def prepared(codes, scales):
    """Weights as FP32 numbers, [N, K and the padding]."""
    padding = codes.shape[1] * PADDING_PERCENT // 100
    return torch.nn.functional.pad(dequantized(codes, scales), (0, padding))


def write(x, w, out):
    """out = x · w^T, [M,K] and [N, K and the padding]."""
    padded = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    padded[:, : x.shape[1]] = x
    out.copy_(torch.mm(padded, w.T))


@linear_kernel("torch-w6a8", weight="int6/128", activation="int8/128", prepare_weight=prepared)
def w6a8(x_codes, x_scales, w, out):
    """W6A8: codes as FP32 numbers."""
    write(SIGN * dequantized(x_codes, x_scales), w, out)


@linear_kernel("torch-w4a16", weight="int4/128", prepare_weight=prepared)
def w4a16(x, w, out):
    """W4A16: weights as FP32 numbers."""
    write(x, w, out)

"""Atom's mixed precision: reordered channels, INT4 groups and a last INT8 group of outliers.

Atom (arXiv 2310.19102) moves the channels with the largest activations to the end of K, keeps those
in 8 bits, and quantizes everything else to 4 bits in groups.
"""

from __future__ import annotations

import math

import torch

from flexq_bench.kernels.errors import ShapeError
from flexq_bench.kernels.formats.grouping import check_shape
from flexq_bench.kernels.formats.operand import Operand
from flexq_bench.kernels.formats.symmetric_quantization import quantize_symmetric

HEAD_BITS, TAIL_BITS = 4, 8
ACTIVATION_CLIP = 0.9  # of the range of a 4-bit group of activations (Atom, section 4.4)
GROUP = 128
_GOLDEN = (math.sqrt(5) - 1) / 2


def tail_start(k: int, group: int = GROUP) -> int:
    """Return the start of the last group of K, which may be shorter than the others."""
    return (-(-k // group) - 1) * group


def default_order(k: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return an order of K channels, int32 [K], for weights without a calibrated one.

    Adjacent columns come from distant channels, as in calibrated orders, so that measured times
    include the cost of the gather.
    """
    stride = max(1, round(k * _GOLDEN))
    while math.gcd(stride, k) != 1:
        stride += 1
    places = torch.arange(k, dtype=torch.int64, device=device)
    return (places * stride % k).to(torch.int32)


def order_of(operand: Operand) -> torch.Tensor:
    """Return the channel of each column, int32 [K], on the values' device; default: identity."""
    device = operand.values.device
    if operand.order is None:
        return torch.arange(operand.k, dtype=torch.int32, device=device)
    return operand.order.to(device, torch.int32).contiguous()


def quantize_mixed(
    matrix: torch.Tensor,
    order: torch.Tensor | None = None,
    *,
    bits: int = HEAD_BITS,
    group: int = GROUP,
    clip: float = 1.0,
) -> Operand:
    """Reorder the columns of [rows, K] and quantize groups to 4 bits, the last one to 8.

    order: int [K], a permutation; column j of the operand is column order[j] of the matrix. None:
    default_order.
    bits: of all groups but the last. group: values of k that share a scale.
    clip: share of a group's range that its codes span, except in the last group.
    Codes and scales of a group, and errors, are those of quantize_symmetric. Also raises ShapeError
    if order is not a permutation of the columns.
    """
    check_shape(matrix, group)
    k = matrix.shape[1]
    chosen = default_order(k, matrix.device) if order is None else order.to(torch.int32)
    if not torch.equal(
        chosen.sort().values, torch.arange(k, dtype=torch.int32, device=chosen.device)
    ):
        raise ShapeError(f"an order must have each of {k} columns once")
    reordered, start = matrix[:, chosen.long()], tail_start(k, group)
    tail = quantize_symmetric(reordered[:, start:], TAIL_BITS, group)
    head = None
    if start:
        head = quantize_symmetric(reordered[:, :start], bits, group, share=clip)
    return joined(head, tail, chosen, bits=bits)


def joined(
    head: Operand | None, tail: Operand, order: torch.Tensor, *, bits: int = HEAD_BITS
) -> Operand:
    """Concatenate INT4 groups and the INT8 group after them. head None: K is one group."""
    assert tail.scales is not None  # both are quantized
    values, scales = tail.values, tail.scales
    if head is not None:
        assert head.scales is not None
        values = torch.cat([head.values, values], dim=1)
        scales = torch.cat([head.scales, scales], dim=1)
    return Operand(values, scales, bits, tail.group, tail_bits=TAIL_BITS, order=order)

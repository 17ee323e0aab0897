"""Matrices at the edges of FlexQ's quantization formula, for tests of everything that computes it.

FP16 [rows, K] by name; K of 300 is a multiple of no group that the tests use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

SMALLEST = 2.0**-24  # of FP16's subnormal numbers
LARGEST = 65504.0  # of FP16
K = 300


def _zeros() -> torch.Tensor:
    """Nothing at all; then values in the first and the last group only."""
    matrix = torch.zeros(3, K)
    matrix[1, :100] = torch.linspace(-3, 3, 100)
    matrix[2, -20:] = 1.0
    return matrix


def _subnormal_values() -> torch.Tensor:
    """Multiples of the smallest FP16 number, whose scales are zero or just not."""
    multiples = torch.arange(K) % 64
    signs = torch.where(torch.arange(K) % 3 == 0, -1.0, 1.0)
    return torch.stack([multiples.clamp(max=top) * signs for top in (1, 3, 15, 16, 31, 63)]) * (
        SMALLEST
    )


def _subnormal_scales() -> torch.Tensor:
    """Groups whose scales are FP16 numbers of few bits, so that codes pass their limits."""
    values = torch.linspace(-1, 1, K)
    tops = torch.tensor([1.5, 2.5, 3.49, 10.3, 101.7]) * SMALLEST * 31
    return tops[:, None] * values


def _largest_values() -> torch.Tensor:
    """The largest FP16 numbers of both signs, alone and beside small ones."""
    matrix = torch.full((3, K), LARGEST)
    matrix[1, ::2] = -LARGEST
    matrix[2] = torch.linspace(-LARGEST, LARGEST, K)
    return matrix


def _ties() -> torch.Tensor:
    """Values in the middle of two codes of 2, 3, 4, 6 and 8 bits, at scales that are powers of 2.

    And the FP16 numbers next to them on either side.
    """
    rows = []
    for top in (1, 3, 7, 31, 127):
        middles = (torch.arange(K) % (2 * top) - top + 0.5).half()
        for towards in (-torch.inf, 0.0, torch.inf):
            row = middles if towards == 0 else torch.nextafter(middles, torch.tensor(towards))
            row = row.float().clamp(-top, top)
            row[::50] = top  # each group's largest
            rows += [row, row * 2.0**-9]
    return torch.stack(rows)


def _negative_extremes() -> torch.Tensor:
    """Groups whose largest magnitude is negative: no code lies below -top."""
    return -torch.rand(4, K, generator=torch.Generator().manual_seed(0)) * 7


def _many_decades() -> torch.Tensor:
    """Normal values with outliers, rows over eight decades."""
    generator = torch.Generator().manual_seed(1)
    matrix = torch.randn(9, K, generator=generator)
    matrix[:, ::37] *= 30
    return matrix * 10.0 ** torch.arange(-6, 3)[:, None]


_BUILDERS: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": _zeros,
    "subnormal values": _subnormal_values,
    "subnormal scales": _subnormal_scales,
    "largest values": _largest_values,
    "ties": _ties,
    "negative extremes": _negative_extremes,
    "many decades": _many_decades,
    "one column": lambda: torch.tensor([[5.0], [-0.3], [0.0], [SMALLEST]]),
}
EDGE_CASES: dict[str, torch.Tensor] = {
    name: build().clamp(-LARGEST, LARGEST).half() for name, build in _BUILDERS.items()
}

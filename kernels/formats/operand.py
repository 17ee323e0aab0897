"""A matrix as a kernel's reference sees it: codes and scales, in no kernel's layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Operand:
    """Activations X [M,K] or weights W [N,K], quantized or dense.

    values: [rows, K], int8 or E4M3 codes, or FP16 values that E3M2 or E3M1 has, where scales is
            given; else FP16/FP32 values.
    scales: [rows, groups], FP16; groups = ceil(K / group). None: dense.
    bits:   of one code; 16 for dense FP16.
    group:  values of k that share a scale; None: one scale a row (or dense). The last group of a
            row is shorter where K is not a multiple.

    Raises ShapeError if scales don't fit values.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    bits: int
    group: int | None

    def __post_init__(self) -> None:
        if self.values.ndim != 2:
            raise ShapeError(f"an operand has two dimensions, got {tuple(self.values.shape)}")
        if self.scales is not None and tuple(self.scales.shape) != (self.rows, self.groups):
            raise ShapeError(
                f"scales of a {self.rows}x{self.k} operand in groups of {self.group} must be "
                f"{self.rows}x{self.groups}, got {tuple(self.scales.shape)}"
            )

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def k(self) -> int:
        return self.values.shape[1]

    @property
    def groups(self) -> int:
        """Groups along K, the last one possibly shorter."""
        return 1 if self.group is None else -(-self.k // self.group)

    @property
    def group_length(self) -> int:
        """Values of k in a full group."""
        return self.k if self.group is None else self.group

    def to(self, device: torch.device | str) -> Operand:
        """The same operand on another device."""
        scales = None if self.scales is None else self.scales.to(device)
        return Operand(self.values.to(device), scales, self.bits, self.group)

    def dequantize(self) -> torch.Tensor:
        """The real values, float64 [rows, K]: code times scale, exact."""
        values = self.values.double()
        if self.scales is None:
            return values
        per_value = self.scales.double().repeat_interleave(self.group_length, dim=1)
        return values * per_value[:, : self.k]

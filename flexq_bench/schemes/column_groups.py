"""Column groups of a weight matrix, each with a number format of its own.

Most schemes give every group of K the same format; Atom (arXiv 2310.19102) ends each row with
8-bit columns. Rounding to nearest and GPTQ work on any such layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.formats import NumberFormat


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Columns start … end - 1 of a weight matrix, with one scale a row.

    format: what they are rounded to (its group is not read); None: they stay as they are.
    """

    start: int
    end: int
    format: NumberFormat | None

    def snapper(self, block: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Function that rounds columns, with the scales of weights [N, end - start]."""
        if self.format is None:
            return lambda values: values
        return self.format.snapper(self.format.fit(block), block.dtype)


def column_groups(k: int, number: NumberFormat | None, start: int = 0) -> tuple[ColumnGroup, ...]:
    """Columns start … k - 1 in the format's groups, the last one possibly shorter."""
    length = (number and number.group) or k
    return tuple(ColumnGroup(s, min(s + length, k), number) for s in range(start, k, length))


def round_to_nearest(weight: torch.Tensor, groups: Sequence[ColumnGroup]) -> torch.Tensor:
    """Weights [N, K] rounded to their groups' formats, float32 [N, K]."""
    rounded = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for group in groups:
        block = weight[:, group.start : group.end].double()
        rounded[:, group.start : group.end] = group.snapper(block)(block)
    return rounded

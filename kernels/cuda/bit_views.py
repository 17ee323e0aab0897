"""Words whose shifted sums modulo 2 are given registers: a packing that is cheap to undo.

A register is the sum modulo 2 of one or two words, shifted, and masked. The sums are a linear map
of the words' bits; packing applies its inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

_WORD = 32


@dataclass(frozen=True)
class BitViews:
    """registers: by register, pairs of a word's index and its shift to the left (negative: to the
    right). mask: bits of a register, in all as many as the words have. rotates: shifts are
    rotations."""

    registers: tuple[tuple[tuple[int, int], ...], ...]
    mask: int
    rotates: bool = False

    @property
    def bits(self) -> list[int]:
        """Bits of a register, the lowest first."""
        return [bit for bit in range(_WORD) if self.mask >> bit & 1]

    def words(self, registers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the words of these registers, int32."""
        bits = [(register, bit) for register in registers for bit in self.bits]
        count = len(bits) // _WORD
        words = [torch.zeros_like(registers[0]) for _ in range(count)]
        for (register, bit), of_words in zip(bits, self._words_of_bits, strict=True):
            is_set = -(register >> bit & 1)
            for i, word in enumerate(words):
                mask = of_words >> _WORD * i & 0xFFFFFFFF
                word ^= is_set & (mask - (mask >> 31 << _WORD))
        return words

    @cached_property
    def _words_of_bits(self) -> list[int]:
        """Solve for the words, as one integer, in which a single bit of the registers is set."""
        # Bits of the words, and the bits of the registers that are their sum.
        rows: list[tuple[int, int]] = []
        for views in self.registers:
            for bit in self.bits:
                sources = [self._source(word, bit - left) for word, left in views]
                rows.append((sum(sources), 1 << len(rows)))
        for column in range(len(rows)):
            pivot = next(i for i in range(column, len(rows)) if rows[i][0] >> column & 1)
            rows[column], rows[pivot] = rows[pivot], rows[column]
            of_words, summed = rows[column]
            for i, row in enumerate(rows):
                if i != column and row[0] >> column & 1:
                    rows[i] = row[0] ^ of_words, row[1] ^ summed
        return [
            sum((row[1] >> bit & 1) << c for c, row in enumerate(rows)) for bit in range(len(rows))
        ]

    def _source(self, word: int, bit: int) -> int:
        if self.rotates:
            bit %= _WORD
        return 1 << _WORD * word + bit if 0 <= bit < _WORD else 0

"""Rotations of a layer's input: y = W x = (W Rᵀ)(R x), with R a Hadamard matrix or near to one.

A Hadamard matrix spreads an outlier over all channels. R = (H ⊗ B) D: H is Sylvester's matrix of a
power of two, B [m, m] makes up for the rest of K = 2^p · m, D are signs. B is the smallest Hadamard
matrix of Paley's (1933, constructions I and II over prime fields) of an order m · 2^j, as QuaRot
takes it (Ashkboos et al., arXiv 2404.00456, section 3.1): of order 12 for 1536, of 36 for 576. Of
orders without one (m = 43) it is a random orthogonal matrix of order m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from kernels.errors import ShapeError

_LARGEST_BLOCK = 512  # each token is multiplied with it


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """R = (H ⊗ B) D of K channels, orthogonal.

    block: B, FP32 [m, m], orthogonal. signs: diagonal of D, FP32 [K]; None: ones.
    """

    block: torch.Tensor
    signs: torch.Tensor | None = None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """R x for each of the vectors x [..., K], in their dtype; of weights [N, K]: W Rᵀ.

        Raises ShapeError if K is no power of two times the block's order.
        """
        signed = x if self.signs is None else x * self.signs.to(x)
        return self._turned(signed, self.block)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """Rᵀ x for each of the vectors x [..., K], in their dtype. Raises ShapeError as apply."""
        turned = self._turned(x, self.block.T)
        return turned if self.signs is None else turned * self.signs.to(x)

    def to(self, device: torch.device | str) -> Rotation:
        """The same rotation on another device."""
        signs = None if self.signs is None else self.signs.to(device)
        return replace(self, block=self.block.to(device), signs=signs)

    def _turned(self, x: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        order = block.shape[0]
        count, rest = divmod(x.shape[-1], order)
        if rest or count & (count - 1) or not count:
            raise ShapeError(
                f"a rotation by a block of {order} takes {order} times a power of two channels, "
                f"got {x.shape[-1]}"
            )
        blocks = x.reshape(-1, count, order)
        turned = blocks if order == 1 else blocks @ block.T.to(x)
        rows, half = turned.shape[0], 1
        while half < count:
            pairs = turned.reshape(rows, count // (2 * half), 2, half * order)
            first, second = pairs.unbind(2)
            turned = torch.stack((first + second, first - second), 2)
            half *= 2
        return (turned / math.sqrt(count)).reshape(x.shape)


def online_rotation(k: int) -> Rotation:
    """The rotation of an input of K channels that is computed when the model runs."""
    return Rotation(torch.tensor(_block(k), dtype=torch.float64).float())


def residual_rotation(hidden: int, seed: int) -> Rotation:
    """The rotation of the residual stream, with random signs, which is folded into the weights."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (hidden,), generator=generator).float() * 2 - 1
    return replace(online_rotation(hidden), signs=signs)


@cache
def _block(k: int) -> list[list[float]]:
    """B for K channels."""
    odd = k // (k & -k)
    if odd == 1:
        return [[1.0]]
    order = odd
    while order <= min(k, _LARGEST_BLOCK):
        matrix = _paley(order)
        if matrix is not None:
            rows: list[list[float]] = (matrix / math.sqrt(order)).tolist()
            return rows
        order *= 2
    generator = torch.Generator().manual_seed(odd)
    drawn = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    orthogonal, upper = torch.linalg.qr(drawn)
    rows = (orthogonal * upper.diagonal().sign()).tolist()
    return list(rows)


def _paley(order: int) -> torch.Tensor | None:
    """A Hadamard matrix [order, order] of ±1 by Paley's constructions; None: they give none."""
    if order % 4:
        return None
    if _is_prime(order - 1):  # I: the field has 3 mod 4 elements
        skew = _bordered(order - 1, -1.0)
        return skew + torch.eye(order, dtype=torch.float64)
    if _is_prime(order // 2 - 1) and order // 2 % 4 == 2:  # II: 1 mod 4
        conference = _bordered(order // 2 - 1, 1.0)
        one = torch.eye(order // 2, dtype=torch.float64)
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(conference, plus) + torch.kron(one, minus)
    return None


def _bordered(prime: int, corner: float) -> torch.Tensor:
    """Jacobsthal's matrix of a prime field with a border of 1 above and `corner` on the left."""
    squares = {i * i % prime for i in range(1, prime)}
    residues = torch.tensor([0.0, *(1.0 if i in squares else -1.0 for i in range(1, prime))])
    index = (torch.arange(prime)[:, None] - torch.arange(prime)) % prime
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1.0, corner
    matrix[1:, 1:] = residues[index].double()
    return matrix


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % i for i in range(2, math.isqrt(number) + 1))

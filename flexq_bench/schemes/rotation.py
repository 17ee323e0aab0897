"""Rotations of a layer's input: y = W x = (W Rᵀ)(R x).

HadamardRotation: R is a Hadamard matrix, or close to one, independent of the input. BlockRotation:
R is constructed from a sample of the input (DuQuant).

A Hadamard matrix spreads an outlier over all channels. R = (H ⊗ B) D for K = 2^p · m channels: H is
Sylvester's matrix of order 2^p, B is [m, m], D contains signs. B is the smallest Hadamard matrix of
Paley's constructions (1933, I and II over prime fields) of an order m · 2^j, as in QuaRot (Ashkboos
et al., arXiv 2404.00456, section 3.1): of order 12 for K = 1536, of order 36 for 576. If there is
none (m = 43), B is a random orthogonal matrix of order m.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache

import torch

from flexq_bench.kernels.errors import ShapeError

_LARGEST_BLOCK = 512  # limited, because each token is multiplied by it


class Rotation(ABC):
    """A matrix R [K, K], orthogonal or diagonal, in a form that is fast to multiply with."""

    def apply_to_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W R⁻¹ for weights [N, K], which multiply R x. Raises ShapeError as apply."""
        return self.apply(weight)

    def undo_in_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return W R for weights [N, K], which multiply x. Raises ShapeError as apply."""
        return self.undo(weight)

    @abstractmethod
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Return R x for vectors x [..., K], in their dtype.

        Raises ShapeError if R doesn't have K channels.
        """

    @abstractmethod
    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """Return Rᵀ x for vectors x [..., K], in their dtype. Raises ShapeError as apply."""

    @abstractmethod
    def to(self, device: torch.device | str) -> Rotation:
        """Return the same rotation on another device."""


@dataclass(frozen=True, slots=True, eq=False)
class HadamardRotation(Rotation):
    """R = (H ⊗ B) D of K channels, orthogonal.

    block: B, FP32 [m, m], orthogonal. signs: diagonal of D, FP32 [K]; None: ones.
    """

    block: torch.Tensor
    signs: torch.Tensor | None = None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        signed = x if self.signs is None else x * self.signs.to(x)
        return self._turned(signed, self.block)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        turned = self._turned(x, self.block.T)
        return turned if self.signs is None else turned * self.signs.to(x)

    def to(self, device: torch.device | str) -> HadamardRotation:
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


@dataclass(frozen=True, slots=True, eq=False)
class MatrixRotation(Rotation):
    """Any orthogonal R. matrix: [K, K]."""

    matrix: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix.T.to(x)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.matrix.to(x)

    def to(self, device: torch.device | str) -> MatrixRotation:
        return MatrixRotation(self.matrix.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class ChannelScales(Rotation):
    """R = diag(scales): AWQ's scales of an input that no previous layer could take.

    scales: FP32 [K], above 0.
    """

    scales: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scales.to(x)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        return x / self.scales.to(x)

    def apply_to_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return self.undo(weight)

    def undo_in_weight(self, weight: torch.Tensor) -> torch.Tensor:
        return self.apply(weight)

    def to(self, device: torch.device | str) -> ChannelScales:
        return ChannelScales(self.scales.to(device))


@dataclass(frozen=True, slots=True, eq=False)
class BlockRotation(Rotation):
    """R = R₂ P R₁ of K channels; R₁ and R₂ are block diagonal with orthogonal blocks.

    blocks: of R₁ and R₂, FP32 [2, K / b, b, b]. order: permutation P, int64 [K]: indices into the
    channels of R₁ x.
    """

    blocks: torch.Tensor
    order: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x)
        first, second = self.blocks.to(x)
        return _by_blocks(_by_blocks(x, first)[..., self.order], second)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x)
        first, second = self.blocks.to(x).mT
        return _by_blocks(_by_blocks(x, second)[..., self.order.argsort()], first)

    def to(self, device: torch.device | str) -> BlockRotation:
        return BlockRotation(self.blocks.to(device), self.order.to(device))

    def _check(self, x: torch.Tensor) -> None:
        if x.shape[-1] != self.order.numel():
            raise ShapeError(
                f"a rotation of {self.order.numel()} channels takes as many, got {x.shape[-1]}"
            )


def _by_blocks(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Multiply vectors x [..., K] by a block diagonal matrix with blocks [K / b, b, b]."""
    count, order, _ = blocks.shape
    rows = x.reshape(-1, count, order).transpose(0, 1)
    return (rows @ blocks.mT).transpose(0, 1).reshape(x.shape)


def outlier_rotation(x: torch.Tensor, largest_block: int, steps: int, seed: int) -> BlockRotation:
    """Construct DuQuant's rotation (arXiv 2406.01721, section 3.2) for inputs like x [tokens, K].

    Source: Lin et al. Blocks have the largest order that divides K and is not above largest_block.
    R₁ is found greedily. Each of `steps` swaps the channel with a block's largest magnitude to the
    front, multiplies the block by an orthogonal matrix whose first row has equal magnitudes, and
    swaps back; the product up to the step with the smallest maximum is used. P distributes the
    channels by magnitude over the blocks in zigzag order, so that all blocks get some large
    channels; R₂ is found like R₁.
    """
    k = x.shape[-1]
    order = max(b for b in range(1, min(k, largest_block) + 1) if k % b == 0)
    spreading = _spreading(order, seed).to(x.device)
    first = _greedy(x, spreading, steps)
    turned = _by_blocks(x, first.to(x))
    zigzag = _zigzag(turned.abs().amax(dim=0), k // order)
    second = _greedy(turned[:, zigzag], spreading, steps)
    return BlockRotation(torch.stack((first, second)), zigzag)


def _greedy(x: torch.Tensor, spreading: torch.Tensor, steps: int) -> torch.Tensor:
    """Return blocks FP32 [K / b, b, b] for inputs x [tokens, K]; spreading: FP64 [b, b]."""
    order = len(spreading)
    rows = x.double().reshape(len(x), -1, order).transpose(0, 1)
    count = len(rows)
    product = torch.eye(order, dtype=torch.float64, device=x.device).repeat(count, 1, 1)
    best, least = product.clone(), rows.abs().amax(dim=(1, 2))
    every = torch.arange(count, device=x.device)
    for _ in range(steps):
        outlier = rows.abs().amax(dim=1).argmax(dim=-1)
        swap = torch.arange(order, device=x.device).repeat(count, 1)
        swap[every, outlier] = 0
        swap[:, 0] = outlier
        # Inputs and the product so far are multiplied by the same factor, from the right.
        both = torch.cat((rows, product), dim=1)
        columns = swap[:, None].expand_as(both)
        both = (both.gather(2, columns) @ spreading).gather(2, columns)
        rows, product = both[:, : len(x)], both[:, len(x) :]
        largest = rows.abs().amax(dim=(1, 2))
        better = largest < least
        best[better], least[better] = product[better], largest[better]
    return best.mT.float().contiguous()


def _zigzag(magnitudes: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return the channels [K], int64, block after block; the largest are distributed first."""
    dealt = magnitudes.argsort(descending=True, stable=True).view(-1, blocks).clone()
    dealt[1::2] = dealt[1::2].flip(1)
    return dealt.T.flatten()


def _spreading(order: int, seed: int) -> torch.Tensor:
    """Random orthogonal matrix, FP64 [order, order], with 1 / sqrt(order) in its first row."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(order, order, generator=generator, dtype=torch.float64)
    drawn[:, 0] = 1.0
    return _orthogonalized(drawn).T.contiguous()


def _orthogonalized(columns: torch.Tensor) -> torch.Tensor:
    """Return the Q of a QR decomposition whose R has a positive diagonal."""
    orthogonal, upper = torch.linalg.qr(columns)
    signed: torch.Tensor = orthogonal * upper.diagonal().sign()
    return signed


def online_rotation(k: int) -> HadamardRotation:
    """Return the rotation of an input of K channels that is computed at run time."""
    return HadamardRotation(torch.tensor(_block(k), dtype=torch.float64).float())


def residual_rotation(hidden: int, seed: int) -> HadamardRotation:
    """Return the rotation of the residual stream, with random signs, to be folded into weights."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (hidden,), generator=generator).float() * 2 - 1
    return replace(online_rotation(hidden), signs=signs)


@cache
def _block(k: int) -> list[list[float]]:
    """Return B for K channels."""
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
    return list(_orthogonalized(drawn).tolist())


def _paley(order: int) -> torch.Tensor | None:
    """Hadamard matrix [order, order] of ±1 by Paley's constructions; None: none of this order."""
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
    """Jacobsthal matrix of a prime field, with a border of 1 above and `corner` on the left."""
    squares = {i * i % prime for i in range(1, prime)}
    residues = torch.tensor([0.0, *(1.0 if i in squares else -1.0 for i in range(1, prime))])
    index = (torch.arange(prime)[:, None] - torch.arange(prime)) % prime
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1.0, corner
    matrix[1:, 1:] = residues[index].double()
    return matrix


def _is_prime(number: int) -> bool:
    return number > 2 and all(number % i for i in range(2, math.isqrt(number) + 1))

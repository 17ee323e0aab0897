"""The contract between a kernel and whoever measures or uses it.

A LinearKernel computes Y[M,N] = X[M,K] · W[N,K]^T (+ bias). It owns its packed layouts and
nothing else: it does not time itself, store anything or decide how often it runs. All launches go
to torch's current stream and may be captured in a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from kernels.errors import ShapeError, UnsupportedError
from kernels.formats import (
    Operand,
    quantize_dual_grained,
    quantize_e4m3,
    quantize_minifloat,
    quantize_mixed,
    quantize_symmetric,
)
from kernels.formats.symmetric import BALANCED_TOP
from kernels.peers.packages import Package
from kernels.peers.packages import check as check_package
from kernels.runtime.nvrtc import Build
from workloads.case import Stage, kernel_label
from workloads.gemm import GemmWorkload

Backend = Literal["cuda", "cpu"]
Capability = tuple[int, int]
Kind = Literal["int", "float", "normal", "dual", "mixed", "balanced"]  # of codes
ALL_STAGES: tuple[Stage, ...] = ("gemm", "linear")


@dataclass(frozen=True, slots=True)
class OperandFormat:
    """How one operand is stored: `bits` a value; codes with a scale per `group` of k.

    group None: one scale a row for codes of 8 bits or fewer; no scale at all for 16 bits.
    kind: of codes of 8 bits or fewer. Floats are E4M3, E3M2 or E3M1 numbers: of 8, 6 or 5 bits.
        Normal: 4-bit NormalFloats (QLoRA, arXiv 2305.14314).
        Dual-grained: kernels/formats/dual_grained.py; mixed: kernels/formats/mixed.py.
        Balanced: integers within ±BALANCED_TOP, whatever the bits.
    """

    bits: int
    group: int | None = None
    kind: Kind = "int"

    @property
    def is_integer(self) -> bool:
        return self.bits <= 8 and self.kind not in ("float", "normal")

    @property
    def name(self) -> str:
        """`int6/128`: integers with a scale per 128 of k; `fp8/row`: one scale a row; `fp16`."""
        if self.bits > 8:
            return f"fp{self.bits}"
        kind = {"float": "fp", "normal": "nf"}.get(self.kind, self.kind)
        return f"{kind}{self.bits}/{'row' if self.group is None else self.group}"


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What the registry, the plan and the records know of a kernel without running it.

    version: part of the series' identity; raised when the same name starts to mean other work.
    min_capability, max_capability: CUDA compute capabilities it runs on, both inclusive.
    reads_weights: False for kernels that have no weights to read (the empty kernel).
    package: the outside package that it calls. None: everything is ours or torch's.
    rounds_to: significant bits that a package leaves of scaled weights or of outputs, where that is
        no more than FP16 has; its results are then judged by these and never bit for bit. None:
        sums are FP32 or exact, and only the output is rounded to FP16.
    """

    name: str
    backend: Backend
    weight: OperandFormat
    activation: OperandFormat
    summary: str
    variant: str = ""
    version: int = 1
    stages: tuple[Stage, ...] = ALL_STAGES
    min_capability: Capability = (8, 0)
    max_capability: Capability = (99, 0)
    reads_weights: bool = True
    package: Package | None = None
    rounds_to: int | None = None

    @property
    def label(self) -> str:
        return kernel_label(self.name, self.variant)

    def check_capability(self, capability: Capability | None) -> None:
        """Raise UnsupportedError if a CUDA kernel can't run on this compute capability.

        Or if the package that it calls is missing.
        """
        if self.backend == "cpu":
            return
        if capability is None:
            raise UnsupportedError(f"{self.label} needs an NVIDIA GPU: see `flexq-bench doctor`")
        if not self.min_capability <= capability <= self.max_capability:
            low, high = self.min_capability, self.max_capability
            raise UnsupportedError(
                f"{self.label} runs on compute capability {low[0]}.{low[1]} to "
                f"{high[0]}.{high[1]}, this GPU has {capability[0]}.{capability[1]}"
            )
        if self.package is not None:
            check_package(self.package)


@dataclass(frozen=True, slots=True)
class Config:
    """Base of a kernel's tunable choices (tile sizes, splits, an algorithm index)."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


PackingKind = Literal["halves", "group-codes", "row-codes"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Where and how what computes activations may write them itself (csrc/decode/operators.cu).

    kind: FP16 values; codes with a scale per 128 of k; codes with a scale a row. bits: of a code.
    values: [>= M, padded K], FP16 or int8. scales: FP32 [groups, padded M] or [M]; None: halves.
    in_mma_order: the codes of a group lie in the order of csrc/imma/layout.cuh.
    """

    kind: PackingKind
    bits: int
    values: torch.Tensor
    scales: torch.Tensor | None = None
    in_mma_order: bool = False


@dataclass(frozen=True, slots=True)
class PackedOperand:
    """Device buffers of an operand in one kernel's layout. rows and k are the logical sizes."""

    buffers: dict[str, torch.Tensor]
    rows: int
    k: int

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def clone(self) -> PackedOperand:
        """The same bytes at another address."""
        copies = {name: buffer.clone() for name, buffer in self.buffers.items()}
        return PackedOperand(copies, self.rows, self.k)

    def copy_from(self, other: PackedOperand) -> None:
        """Fill these buffers with those of an operand of the same layout and sizes."""
        for name, buffer in other.buffers.items():
            self.buffers[name].copy_(buffer)


class LinearKernel(ABC):
    """One implementation of a linear layer on one backend."""

    spec: KernelSpec

    def quantize_weight(self, weight: torch.Tensor) -> Operand:
        """Codes of a real-valued weight [N,K] in this kernel's format; the reference sees these."""
        return _to_format(weight, self.spec.weight)

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        """Codes of real-valued activations [M,K]; `activate` must give the same ones."""
        return _to_format(x, self.spec.activation)

    @abstractmethod
    def pack_weight(self, weight: Operand) -> PackedOperand:
        """Weights [N,K] in this kernel's layout, on the device of `weight`."""

    @abstractmethod
    def pack_activation(self, x: Operand) -> PackedOperand:
        """Activations [M,K] of given codes in this kernel's layout (the `gemm` stage's input)."""

    @abstractmethod
    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        """Buffers that `activate` fills."""

    @abstractmethod
    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        """Quantize and pack real activations x [M,K] FP16 into `packed`: the online part."""

    @abstractmethod
    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        """out[M,N] FP16 = x · w^T + bias[N]. config None: the kernel's own heuristic."""

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        """FP16 in, FP16 out: `activate` into `packed`, then `gemm`. A kernel may fuse the two."""
        self.activate(x, packed)
        self.gemm(packed, w, out, bias=bias, config=config)

    def narrow(self, w: PackedOperand, config: Config | None) -> PackedOperand:
        """What this configuration reads of packed weights; the rest may be freed."""
        return w

    def packing(self, x: PackedOperand, config: Config | None) -> Packing | None:
        """How a fused producer may fill `x` for `gemm` under this configuration.

        None: only `activate` can.
        """
        return None

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        """Configurations worth timing for this shape; empty: there is nothing to choose."""
        return ()

    def tuning_bucket(self, m: int) -> int:
        """Equal for numbers of tokens that share a choice among the candidates."""
        return m

    def default_config(self, gemm: GemmWorkload) -> Config | None:
        """What `config=None` means for this shape."""
        return None

    def builds(self) -> Sequence[Build]:
        """Every way this kernel may be compiled; a few values stand for a large range of tokens."""
        return ()

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        """What runs for this shape and configuration; empty: a library's code, not ours."""
        return ()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe's check found."""

    exact: bool
    detail: str = field(default="")


class Probe(ABC):
    """Something measured beside the kernels: the read floor, the empty kernel."""

    spec: KernelSpec

    @abstractmethod
    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        """One copy of the buffers a launch touches, filled with seeded random bytes."""

    @abstractmethod
    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        """One launch on the current stream. config None: the probe's own heuristic."""

    @abstractmethod
    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        """Launch once and compare what it did with a computation that shares nothing with it."""

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        """Configurations worth timing: a floor must be the fastest way to read."""
        return ()

    def builds(self) -> Sequence[Build]:
        """Every way this probe may be compiled."""
        return ()

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        """What runs for this shape and configuration."""
        return ()


Kernel = LinearKernel | Probe


def check_gemm(x: PackedOperand, w: PackedOperand, out: torch.Tensor) -> GemmWorkload:
    """The one shape rule of all launchers. Raises ShapeError."""
    if x.k != w.k:
        raise ShapeError(f"x has K={x.k} and w has K={w.k}: both must be the same layer's")
    if tuple(out.shape) != (x.rows, w.rows):
        raise ShapeError(f"out must be {x.rows}x{w.rows}, got {tuple(out.shape)}")
    if out.dtype != torch.float16 or not out.is_contiguous():
        raise ShapeError(f"out must be contiguous float16, got {out.dtype}")
    return GemmWorkload(x.rows, w.rows, x.k)


def checked_scales(operand: Operand, fmt: OperandFormat) -> torch.Tensor:
    """The operand's scales [rows, groups]. Raises ShapeError if its codes are of another format."""
    kind: Kind = "float" if operand.values.is_floating_point() else "int"
    if operand.row_scales is not None:
        kind = "dual"
    if operand.tail_bits is not None:
        kind = "mixed"
    if fmt.kind == "balanced" and kind == "int":
        largest = int(operand.values.abs().max())
        if largest > BALANCED_TOP:
            raise ShapeError(f"balanced codes lie within ±{BALANCED_TOP}, got one of {largest}")
        kind = "balanced"
    given = OperandFormat(operand.bits, operand.group, kind)
    if operand.scales is None or given != fmt:
        raise ShapeError(f"need codes of format {fmt.name}, got {given.name}")
    return operand.scales


def _to_format(matrix: torch.Tensor, fmt: OperandFormat) -> Operand:
    if fmt.bits == 8 and fmt.kind == "float":
        return quantize_e4m3(matrix)
    if fmt.bits < 8 and fmt.kind == "float":
        return quantize_minifloat(matrix, fmt.bits, fmt.group)
    if fmt.kind == "dual" and fmt.group is not None:
        return quantize_dual_grained(matrix, fmt.group)
    if fmt.kind == "mixed":
        return quantize_mixed(matrix)
    if fmt.kind == "balanced":
        return quantize_symmetric(matrix, fmt.bits, fmt.group, top=BALANCED_TOP)
    if fmt.is_integer:
        return quantize_symmetric(matrix, fmt.bits, fmt.group)
    return Operand(matrix.to(torch.float16), None, fmt.bits, None)

"""Interfaces of kernels and probes for the code that measures or uses them.

A LinearKernel computes Y[M,N] = X[M,K] · W[N,K]^T (+ bias) and defines its packed layouts. The
caller times, repeats and stores. All launches go to torch's current stream and may be captured in
a CUDA graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch

from flexq_bench.kernels.errors import ShapeError, UnsupportedError
from flexq_bench.kernels.external_packages.packages import Package
from flexq_bench.kernels.external_packages.packages import check as check_package
from flexq_bench.kernels.formats import (
    DENSE_TYPES,
    FP16,
    NumberFormat,
    Operand,
    format_of,
    quantize,
)
from flexq_bench.kernels.runtime.nvrtc import Build
from flexq_bench.kernels.runtime.ranks import Ranks
from flexq_bench.workloads.case import Stage, kernel_label
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload

Backend = Literal["cuda", "cpu"]
Capability = tuple[int, int]
ALL_STAGES: tuple[Stage, ...] = ("gemm", "linear")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """Static description of a kernel, for the registry, the plan and the records.

    version: part of the series' identity; incremented when the kernel's work changes.
    min_capability, max_capability: supported CUDA compute capabilities, both inclusive.
    reads_weights: False for kernels without weights (the empty kernel).
    overlaps_launches: True if it starts while the previous launch still runs (programmatic
        dependent launch); its floor is then that of a stream of launches.
    package: the third-party package that it calls. None: only this repository and torch.
    rounds_to: significant bits to which a package rounds scaled weights or outputs, or a tensor
        core the terms of its sums, if at most those of FP16; results are then checked to this
        precision and never bit for bit. Of an external kernel 8 (BF16) to 11 (FP16).
        None: sums are FP32 or exact, and only the output is rounded to FP16.
    integer_sums: True if it sums products of integer codes as integers. False: it may scale codes
        first and round the products, so results are judged relative to the sum of their magnitudes.
    output: type of the results, and of inputs that are not quantized: a key of DENSE_TYPES.
    operation: name of its definition (workloads/operation.py). cache: format of its state.
    updates: pairs of an output and the input in whose memory the kernel writes it.
    source_hash: hash of the sources of an external kernel; not part of the series' identity.
        None: a kernel of this repository, identified by its commit.
    """

    name: str
    backend: Backend
    weight: NumberFormat
    activation: NumberFormat
    summary: str
    variant: str = ""
    version: int = 1
    stages: tuple[Stage, ...] = ALL_STAGES
    min_capability: Capability = (8, 0)
    max_capability: Capability = (99, 0)
    reads_weights: bool = True
    overlaps_launches: bool = False
    package: Package | None = None
    rounds_to: int | None = None
    integer_sums: bool = True
    source_hash: str | None = None
    output: str = "fp16"
    operation: str = "linear"
    cache: NumberFormat = FP16
    updates: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        return kernel_label(self.name, self.variant)

    @property
    def formats(self) -> dict[str, NumberFormat]:
        """The declared formats, by the names that definitions have for them."""
        return {
            "weight": self.weight,
            "activation": self.activation,
            "cache": self.cache,
            "dtype": NumberFormat.parse(self.output),
        }

    @property
    def format_names(self) -> dict[str, str]:
        """Names of the declared formats."""
        return {name: number.name for name, number in self.formats.items()}

    @property
    def output_dtype(self) -> torch.dtype:
        return DENSE_TYPES[self.output]

    @property
    def input_dtype(self) -> torch.dtype:
        """The type of real activations: of the results if these are quantized."""
        dense = self.activation.dense_type if self.activation.is_dense else self.output
        return DENSE_TYPES[dense]

    @property
    def is_external(self) -> bool:
        """True for a kernel of a file or package that isn't of this project."""
        return self.source_hash is not None

    def check_capability(self, capability: Capability | None) -> None:
        """Check that the kernel runs on a GPU of this compute capability (None: no GPU).

        Raises UnsupportedError if it does not, or if the package that it calls is missing. CPU
        kernels always pass.
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


def is_plain(spec: KernelSpec) -> bool:
    """Return True if no code of an external kernel decides what the spec is equal to."""
    return type(spec) is KernelSpec and all(
        type(number) is NumberFormat for number in spec.formats.values()
    )


@dataclass(frozen=True, slots=True)
class Config:
    """Base class of a kernel's tunable parameters (tile sizes, splits, an algorithm index)."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def defines(self) -> dict[str, Any]:
        """Return the defines of a source that has one for each parameter."""
        return {name.upper(): value for name, value in asdict(self).items()}


PackingKind = Literal["halves", "group-codes", "row-codes"]


@dataclass(frozen=True, slots=True)
class Packing:
    """Buffers and format for an operator that fuses quantization and packing into its output.

    Such operators are in csrc/decode/operators.cu and csrc/decode/attention.cu.

    kind: FP16 values; codes with a scale per 128 of k; codes with a scale per row. bits: of a code.
    values: [>= M, padded K], FP16 or int8. scales: FP32 [groups, padded M] or [M]; None: halves.
    in_mma_order: True if the codes of a group are in the order of csrc/imma/mma_order.cuh.
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

    def with_buffers(self, **buffers: torch.Tensor) -> PackedOperand:
        """Return the operand with other or further buffers."""
        return replace(self, buffers=self.buffers | buffers)

    @property
    def nbytes(self) -> int:
        return sum(b.numel() * b.element_size() for b in self.buffers.values())

    def clone(self) -> PackedOperand:
        """Copy the buffers to new memory."""
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
        """Quantize a real-valued weight [N,K] to this kernel's format, also for the reference."""
        return quantize(weight, self.spec.weight)

    def quantize_activation(self, x: torch.Tensor) -> Operand:
        """Quantize real-valued activations [M,K]; `activate` must produce the same codes."""
        return quantize(x, self.spec.activation)

    @abstractmethod
    def pack_weight(self, weight: Operand) -> PackedOperand:
        """Pack weights [N,K] into this kernel's layout, on the device of `weight`."""

    @abstractmethod
    def pack_activation(self, x: Operand) -> PackedOperand:
        """Pack quantized activations [M,K] into this kernel's layout (input of stage `gemm`)."""

    @abstractmethod
    def empty_activation(self, m: int, k: int, device: torch.device) -> PackedOperand:
        """Allocate the buffers that `activate` fills."""

    @abstractmethod
    def activate(self, x: torch.Tensor, packed: PackedOperand) -> None:
        """Quantize and pack activations x [M,K] FP16 into `packed`, at inference time."""

    @abstractmethod
    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> torch.Tensor | None:
        """Compute out[M,N] = x · w^T + bias[N], of the type `spec.output`.

        config None: `default_config`. Returns the output if the kernel allocated it itself, and
        None if it wrote `out`.
        """

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> torch.Tensor | None:
        """Run `activate` into `packed`, then `gemm`. A kernel may fuse the two."""
        ready = self.activated(x, self.for_weights(packed, w))
        return self.gemm(ready, w, out, bias=bias, config=config)

    def activated(self, x: torch.Tensor, packed: PackedOperand) -> PackedOperand:
        """Return activations for `gemm`: `packed`, filled by `activate`, or others, not copied."""
        self.activate(x, packed)
        return packed

    def read_only(self) -> frozenset[str]:
        """Return the operands of `gemm`, of "x" and "w", that a launch must not modify.

        Operands in a private layout may be written as long as results stay correct.
        """
        return frozenset()

    def for_weights(self, packed: PackedOperand, w: PackedOperand) -> PackedOperand:
        """Return `packed` with the buffers of the weights that `activate` reads.

        A layer with a calibrated scale, FP32 [1], has it in a buffer `static` of its weights.
        """
        static = w.buffers.get("static")
        return packed if static is None else packed.with_buffers(static=static)

    def narrow(self, w: PackedOperand, config: Config | None) -> PackedOperand:
        """Return the buffers of the weights that this configuration reads; others may be freed."""
        return w

    def packing(self, x: PackedOperand, config: Config | None) -> Packing | None:
        """Return the packing with which a fused operator may fill `x` for `gemm` with `config`.

        None: only `activate` can fill it.
        """
        return None

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        """Return the configurations from which kernels/autotune.py chooses by timing them.

        Empty: there is only one.
        """
        return ()

    def tuning_bucket(self, m: int) -> int:
        """Return a number that is equal for all m that share one tuning result."""
        return m

    def default_config(self, gemm: GemmWorkload) -> Config | None:
        """Return the configuration for this shape without tuning; `config=None` selects it."""
        return None

    def builds(self) -> Sequence[Build]:
        """Return every build of this kernel; a large range of tokens is sampled at a few values."""
        return ()

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        """Return the builds that run for this shape and configuration; empty: only library code."""
        return ()

    def machine_code(self, target: str) -> bytes | None:
        """Return the cubin of an external kernel for an architecture, for example "sm_90".

        Needs no GPU. None: it provides none. Kernels of this repository list `builds` instead.
        """
        return None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe's check."""

    exact: bool
    detail: str = field(default="")


def probe_spec(
    name: str, backend: Backend, summary: str, *, weight: NumberFormat = FP16, **others: Any
) -> KernelSpec:
    """Return the spec of a probe without activations of its own. others: fields of KernelSpec."""
    return KernelSpec(name, backend, weight, FP16, summary, stages=("gemm",), **others)


class Probe(ABC):
    """A measurement other than a linear layer: the read floor, the empty kernel."""

    spec: KernelSpec

    @abstractmethod
    def allocate(self, gemm: GemmWorkload, device: torch.device, seed: int) -> PackedOperand:
        """Allocate the buffers of one launch, filled with seeded random bytes."""

    @abstractmethod
    def launch(self, operand: PackedOperand, config: Config | None = None) -> None:
        """Launch once on the current stream. config None: the probe's default."""

    @abstractmethod
    def check(self, operand: PackedOperand, config: Config | None = None) -> ProbeResult:
        """Launch once and compare the result with an independent computation."""

    def candidates(self, gemm: GemmWorkload) -> Sequence[Config]:
        """Return the configurations to time: a floor must be the fastest way to read."""
        return ()

    def builds(self) -> Sequence[Build]:
        """Return every build of this probe."""
        return ()

    def builds_for(self, gemm: GemmWorkload, config: Config | None) -> Sequence[Build]:
        """Return the builds that run for this shape and configuration."""
        return self.builds()


class OperationKernel(ABC):
    """One implementation of an operation other than a linear layer, on one backend.

    Buffers of inputs are named `<input>.<part>`: `values`, or `codes`, `scales` and the others of
    kernels/operand_tensors.py.
    """

    spec: KernelSpec

    def prepare(self, workload: OperationWorkload, streamed: PackedOperand) -> PackedOperand:
        """Pack the weights and states into this kernel's layout."""
        return streamed

    @abstractmethod
    def launch(
        self,
        workload: OperationWorkload,
        fresh: PackedOperand,
        streamed: PackedOperand,
        out: Mapping[str, torch.Tensor],
        config: Config | None = None,
    ) -> Mapping[str, torch.Tensor] | None:
        """Compute `out` from the inputs: fresh ones, and prepared ones.

        Returns the outputs if the kernel allocated them itself, and None if it wrote `out`.
        """

    def read_only(self) -> frozenset[str]:
        """Return the operands of `launch`, of "x" and "w", that it must not modify."""
        return frozenset("xw")

    def candidates(self, workload: Any) -> Sequence[Config]:
        """Return the configurations to choose from by timing; empty: there is only one."""
        return ()

    def default_config(self, workload: OperationWorkload) -> Config | None:
        """Return the configuration without tuning."""
        return None

    def builds(self) -> Sequence[Build]:
        """Return every build of this kernel."""
        return ()

    def builds_for(self, workload: Any, config: Config | None) -> Sequence[Build]:
        """Return the builds that run for these parameters; empty: only library code."""
        return ()

    def machine_code(self, target: str) -> bytes | None:
        """Return the cubin for an architecture, as LinearKernel.machine_code does."""
        return None


class RankKernel(ABC):
    """One implementation of an operation on several GPUs, with one process, its rank, on each.

    Row i of every input and output of such an operation is that of rank i.
    """

    spec: KernelSpec

    @abstractmethod
    def launch(self, ranks: Ranks, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return a rank's rows of the outputs from its rows of the inputs.

        Inputs may be overwritten. Launches of all ranks belong together, and may be captured in a
        CUDA graph after a first call.
        """

    def candidates(self, workload: Any) -> Sequence[Config]:
        """There is one configuration."""
        return ()

    def builds(self) -> Sequence[Build]:
        """There are none: only library code runs."""
        return ()

    def builds_for(self, workload: Any, config: Config | None) -> Sequence[Build]:
        """There are none."""
        return ()


ExternalKernel = LinearKernel | OperationKernel
Kernel = ExternalKernel | Probe | RankKernel


def check_gemm(
    x: PackedOperand,
    w: PackedOperand,
    out: torch.Tensor,
    dtype: torch.dtype = torch.float16,
) -> GemmWorkload:
    """Check the shapes and the dtype of the output of a GEMM. Raises ShapeError."""
    if x.k != w.k:
        raise ShapeError(f"x has K={x.k} and w has K={w.k}: both must be the same layer's")
    if tuple(out.shape) != (x.rows, w.rows):
        raise ShapeError(f"out must be {x.rows}x{w.rows}, got {tuple(out.shape)}")
    if out.dtype != dtype or not out.is_contiguous():
        needed = str(dtype).removeprefix("torch.")
        raise ShapeError(f"out must be contiguous {needed}, got {out.dtype}")
    return GemmWorkload(x.rows, w.rows, x.k)


class GemmCall(NamedTuple):
    """Checked arguments of LinearKernel.gemm, and the shape of the GEMM."""

    x: PackedOperand
    w: PackedOperand
    out: torch.Tensor
    bias: torch.Tensor | None
    shape: GemmWorkload


class CheckedGemm(LinearKernel):
    """A kernel that implements `compute`, whose operands are checked, instead of `gemm`."""

    def gemm(
        self,
        x: PackedOperand,
        w: PackedOperand,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> torch.Tensor | None:
        shape = check_gemm(x, w, out, self.spec.output_dtype)
        return self.compute(GemmCall(x, w, out, bias, shape), config)

    @abstractmethod
    def compute(self, call: GemmCall, config: Config | None) -> torch.Tensor | None:
        """Compute out = x · w^T + bias, or return it. config None: `default_config`."""


def checked_scales(operand: Operand, fmt: NumberFormat) -> torch.Tensor:
    """Return the operand's scales [rows, groups]. Raises ShapeError if its format differs.

    The clip of the formats is not compared: it is already part of the scales.
    """
    actual, fmt = format_of(operand), replace(fmt, clip=1.0)
    if fmt.kind == "balanced" and actual.kind == "symmetric":
        largest, top = int(operand.values.abs().max()), fmt.limits[1]
        if largest > top:
            raise ShapeError(f"balanced codes lie within ±{top}, got one of {largest}")
        actual = replace(actual, kind="balanced")
    if operand.scales is None or actual != fmt:
        raise ShapeError(f"need codes of format {fmt.name}, got {actual.name}")
    return operand.scales

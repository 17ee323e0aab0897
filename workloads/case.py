"""A case: one kernel on one workload, in one stage and one cache state."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, cast

from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.operation import OperationWorkload, parse_values

# "gemm", "linear": without and with the quantization of activations; "op": of other operations
Stage = Literal["gemm", "linear", "op"]
LINEAR_STAGES: tuple[Stage, ...] = ("gemm", "linear")
CacheMode = Literal["cold", "hot"]
Regime = Literal["boost", "sustained"]
_DENSE_BITS = 16
SERVING = "serving"  # operation of a served model: a load and a metric of its requests
_KEY = re.compile(
    r"(?P<label>\S+) (?P<stage>gemm|linear|op) (?P<cache>cold|hot) "
    r"(m(?P<m>\d+)n(?P<n>\d+)k(?P<k>\d+)|(?P<other>[a-z][a-z0-9_]*:\S*))"
    r"( (?P<regime>sustained))?"
)
_KERNEL_LABEL = re.compile(r"(?P<kernel>[a-z0-9*][a-z0-9*.-]*)(\[(?P<variant>[a-z0-9+.,-]+)\])?")


def parse_kernel_label(label: str) -> tuple[str, str]:
    """Split `flexq-w6a6[-evict-first]` into ("flexq-w6a6", "-evict-first"); no bracket: variant "".

    Raises WorkloadError if the label has another form.
    """
    match = _KERNEL_LABEL.fullmatch(label)
    if match is None:
        raise WorkloadError(f"a kernel is written name or name[variant], got {label!r}")
    return match["kernel"], match["variant"] or ""


def workload_of(operation: str, parameters: str) -> GemmWorkload | OperationWorkload:
    """Return the workload of a stored series. Raises WorkloadError if there is none like it."""
    values = dict(parse_values(parameters))
    if operation != GemmWorkload.operation:
        return OperationWorkload(operation, tuple(values.items()))
    sizes = [values.get(name) for name in "mnk"]
    if len(values) != len(sizes) or not all(isinstance(size, int) for size in sizes):
        raise WorkloadError(f"a linear layer has m, n and k, got {parameters!r}")
    return GemmWorkload(*sizes)  # type: ignore[arg-type]  # integers, as checked


def stored_case(label: str, stage: str, cache: str, operation: str, parameters: str) -> str:
    """Return the key of a stored result's case; of no known operation: its label and parameters."""
    place = workload_of(operation, parameters).key if operation else parameters
    return " ".join(filter(None, (label, stage, cache, place)))


def kernel_label(kernel: str, variant: str) -> str:
    """Return the label of a kernel and variant: `flexq-w6a6` or `flexq-w6a6[vanilla]`."""
    return f"{kernel}[{variant}]" if variant else kernel


def bits_label(operation: str, weight_bits: int, act_bits: int) -> str:
    """Return the formats of a result: `w6a8`; empty: it has none.

    Operations other than linear layers need not have weights, or have these formats: only quantized
    ones are shown, as `a8`.
    """
    if not weight_bits or operation == GemmWorkload.operation:
        return f"w{weight_bits}a{act_bits}" if weight_bits else ""
    formats = (("w", weight_bits), ("a", act_bits))
    return "".join(f"{name}{bits}" for name, bits in formats if 0 < bits < _DENSE_BITS)


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one workload: an item of a plan, with one result in each run.

    regime: "boost", at the clock without power throttling, or "sustained", under steady load. model
    and layer are labels for display (for example "llama-7b", "qkv_proj"), not part of the identity:
    two models with the same layer shape share one case.
    """

    kernel: str
    workload: GemmWorkload | OperationWorkload
    variant: str = ""
    stage: Stage = "gemm"
    cache: CacheMode = "cold"
    regime: Regime = "boost"
    model: str = field(default="", compare=False)
    layer: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if (self.stage == "op") == isinstance(self.workload, GemmWorkload):
            fitting = ", ".join(LINEAR_STAGES) if self.operation == "linear" else "op"
            raise WorkloadError(f"{self.operation} has stage {fitting}, got {self.stage}")

    @property
    def operation(self) -> str:
        """Name of the operation: `linear`, `attention_decode`."""
        return self.workload.operation

    @property
    def gemm(self) -> GemmWorkload:
        """The workload of a linear layer. Raises WorkloadError for other operations."""
        if not isinstance(self.workload, GemmWorkload):
            raise WorkloadError(f"{self.label} computes {self.operation}, which is no GEMM")
        return self.workload

    @property
    def gpus(self) -> int:
        """Number of GPUs that it needs, all of one host."""
        return 1 if isinstance(self.workload, GemmWorkload) else self.workload.gpus

    @property
    def shape(self) -> tuple[object, ...]:
        """Values that cases measured one after the other share: N and K of linear layers."""
        if isinstance(self.workload, GemmWorkload):
            return (self.workload.n, self.workload.k)
        return (self.workload.operation, self.workload.values)

    @property
    def label(self) -> str:
        return kernel_label(self.kernel, self.variant)

    @property
    def key(self) -> str:
        """Identity within a run.

        For example `flexq-w6a6 gemm cold m1n4096k4096`, or
        `sdpa op cold attention_decode:batch=1,heads=32,context=1024`.
        """
        regime = "" if self.regime == "boost" else f" {self.regime}"
        return f"{self.label} {self.stage} {self.cache} {self.workload.key}{regime}"

    @classmethod
    def from_key(cls, key: str) -> Case:
        """Return the case with this key; model and layer are empty, since they are not in the key.

        Raises WorkloadError if the key has another form.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            raise WorkloadError(f"{key!r} is not the key of a case")
        kernel, variant = parse_kernel_label(match["label"])
        return cls(
            kernel,
            OperationWorkload.from_key(match["other"])
            if match["other"]
            else GemmWorkload(int(match["m"]), int(match["n"]), int(match["k"])),
            variant=variant,
            stage=cast(Stage, match["stage"]),
            cache=cast(CacheMode, match["cache"]),
            regime=cast(Regime, match["regime"] or "boost"),
        )

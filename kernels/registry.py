"""Registry of kernels. To add one: a source in csrc/, a launcher in cuda/, a line in _ENTRIES.

A label is `name` or `name[variant]`. The same name may have a CUDA and a CPU implementation: they
are two backends of one kernel and are never compared with each other.

External kernels are named `package.name`. Those of installed packages are registered on the first
lookup, others by `add` (see kernels/external).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial

from flexq_bench.kernels.collectives import AllReduce, DecoderAllReduce
from flexq_bench.kernels.contract import Backend, ExternalKernel, Kernel, KernelSpec
from flexq_bench.kernels.cpu import bitplane
from flexq_bench.kernels.cpu import dense as cpu_dense
from flexq_bench.kernels.cpu import dual_grained as cpu_dgq
from flexq_bench.kernels.cpu import mixed as cpu_mixed
from flexq_bench.kernels.cpu import probes as cpu_probes
from flexq_bench.kernels.cuda import abq, btc, flexq, fp16
from flexq_bench.kernels.cuda import probes as cuda_probes
from flexq_bench.kernels.cuda.cublas import dense as cuda_dense
from flexq_bench.kernels.cuda.cublas import fp8, gemmex, int8_sums
from flexq_bench.kernels.cuda.grouped import declared as grouped
from flexq_bench.kernels.cuda.imma import atom, dual_grained, four_bit, two_level
from flexq_bench.kernels.cuda.imma import gemm as imma
from flexq_bench.kernels.cuda.imma import microscaling as fp8_microscaling
from flexq_bench.kernels.cuda.weight_only import gemm as weight_only
from flexq_bench.kernels.cuda.weight_only import microscaling, minifloat
from flexq_bench.kernels.decoder import declared as decoder
from flexq_bench.kernels.errors import UnknownKernelError, UnsupportedError
from flexq_bench.kernels.external import installed
from flexq_bench.kernels.external_packages import bitsandbytes, experts, humming, torchao
from flexq_bench.kernels.formats import FP16, NumberFormat
from flexq_bench.workloads.case import kernel_label, parse_kernel_label
from flexq_bench.workloads.probes import floor_kernel

_SUGGESTIONS = 8  # kernels that an error lists, closest first

_READ_FORMATS = {
    number.bits: number
    for number in (NumberFormat(4, 128), NumberFormat(6, 128), NumberFormat(8), FP16)
}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A kernel and its factory for each backend; None: that backend has no such kernel."""

    label: str
    cpu: Callable[[], Kernel] | None = None
    cuda: Callable[[], Kernel] | None = None

    def factory(self, backend: Backend) -> Callable[[], Kernel] | None:
        return self.cpu if backend == "cpu" else self.cuda


def _with_stand_in(
    label: str, stand_in: Callable[[KernelSpec], Kernel], cuda: Callable[[], Kernel]
) -> _Entry:
    """Return the entry of a CUDA kernel with a CPU version of the same name and formats."""
    return _Entry(label, cpu=lambda: stand_in(cuda().spec), cuda=cuda)


def _minifloat(bits: int, variant: str) -> _Entry:
    label = kernel_label(f"fp{bits}-w{bits}a16", variant)
    cuda = partial(minifloat.MinifloatGemm, bits, variant)
    if variant == "-bias-shift":
        return _Entry(label, cuda=cuda)
    return _with_stand_in(label, cpu_dense.DequantizedGemm, cuda)


_ENTRIES: tuple[_Entry, ...] = (
    *(
        _with_stand_in(
            f"flexq-w6a{a_bits}",
            bitplane.BitPlaneGemm,
            partial(btc.BinaryTensorCoreGemm, a_bits),
        )
        for a_bits in (6, 8)
    ),
    *(
        _Entry(
            f"flexq-w6a{a_bits}[{variant}]",
            cuda=partial(btc.BinaryTensorCoreSums, a_bits)
            if not btc.VARIANTS[variant].dequant
            else partial(btc.BinaryTensorCoreGemm, a_bits, variant),
        )
        for a_bits in (6, 8)
        for variant in btc.VARIANTS
        if variant
    ),
    _with_stand_in("flexq", bitplane.BitPlaneGemm, partial(flexq.FlexqGemm, 6)),
    _with_stand_in("flexq[w6a8]", bitplane.BitPlaneGemm, partial(flexq.FlexqGemm, 8, "w6a8")),
    *(
        _Entry(f"flexq-imma-w6a{a_bits}", cuda=partial(imma.Int8TensorCoreGemm, a_bits))
        for a_bits in (6, 8)
    ),
    *(
        _with_stand_in(
            f"abq-w{w_bits}a{a_bits}",
            bitplane.BitPlaneGemm,
            partial(abq.ArbitraryBitGemm, w_bits, a_bits),
        )
        for w_bits in range(2, 9)
        for a_bits in range(2, 9)
    ),
    *(
        _Entry(
            f"abq-w{w_bits}a{a_bits}[{variant}]",
            cuda=partial(abq.ArbitraryBitGemm, w_bits, a_bits, variant),
        )
        for w_bits, a_bits in ((6, 6), (2, 8))
        for variant in abq.SWITCHES
        if variant
    ),
    _with_stand_in(
        "abq-w2*a8",
        bitplane.BitPlaneGemm,
        partial(abq.ArbitraryBitGemm, 3, 8, balanced=True),
    ),
    _with_stand_in("cublaslt-w8a8", cpu_dense.Int8Gemm, cuda_dense.Int8Gemm),
    _Entry("cublaslt-w8a8[sums]", cuda=int8_sums.LtSums),
    _Entry("cublas-w8a8[gemmex]", cuda=gemmex.GemmExGemm),
    _Entry("cublas-w8a8[gemmex-sums]", cuda=int8_sums.GemmExSums),
    _with_stand_in("cublaslt-fp8", cpu_dense.DequantizedGemm, fp8.Fp8Gemm),
    *(
        _with_stand_in(label, cpu_dense.DequantizedGemm, partial(engine, label, *formats))
        for engine, kernels in (
            (weight_only.WeightOnlyGemm, weight_only.KERNELS),
            (microscaling.MicroscalingGemm, microscaling.KERNELS),
        )
        for label, formats in kernels.items()
    ),
    *(
        _with_stand_in(
            label,
            cpu_dense.DequantizedGemm,
            partial(fp8_microscaling.MicroscalingFp8Gemm, label, weight),
        )
        for label, weight in fp8_microscaling.KERNELS.items()
    ),
    *(_minifloat(bits, variant) for bits in (6, 5) for variant in minifloat.VARIANTS[bits]),
    *(
        _with_stand_in(
            kernel_label("dgq-w4a8", variant),
            cpu_dgq.DualGrainedGemm,
            partial(dual_grained.DualGrainedGemm, variant),
        )
        for variant in ("", "static")
    ),
    _with_stand_in("dual-w6a8", cpu_dgq.DualGrainedGemm, two_level.TwoLevelGemm),
    _with_stand_in("group-w4a8", cpu_dense.DequantizedGemm, four_bit.GroupScaledGemm),
    _Entry("atom-w4a4", cpu=cpu_mixed.MixedGemm, cuda=atom.MixedGemm),
    _Entry("atom-w4a4[int4-mma]", cuda=partial(atom.MixedGemm, "int4-mma")),
    _with_stand_in("cublas-fp16", cpu_dense.Fp16Gemm, cuda_dense.Fp16Gemm),
    _with_stand_in("fp16", cpu_dense.DequantizedGemm, fp16.FastestFp16Gemm),
    *(
        _Entry(declared.name, cuda=partial(declared.kernel, "cuda"))
        for declared in (
            bitsandbytes.int8,
            bitsandbytes.normal_float,
            torchao.tinygemm,
            *humming.KERNELS,
            *experts.KERNELS,
        )
    ),
    *(
        _Entry(
            kernel_label(declared.name, declared.variant),
            cpu=partial(declared.kernel, "cpu"),
            cuda=partial(declared.kernel, "cuda"),
        )
        for declared in decoder.KERNELS
    ),
    _Entry("all-reduce", cpu=partial(AllReduce, "cpu"), cuda=partial(AllReduce, "cuda")),
    _Entry("decoder-all-reduce", cuda=partial(DecoderAllReduce, "cuda")),
    *(
        _Entry(
            kernel_label(of_cpu.name, of_cpu.variant),
            cpu=partial(of_cpu.kernel, "cpu"),
            cuda=partial(of_cuda.kernel, "cuda"),
        )
        for of_cpu, of_cuda in grouped.KERNELS
    ),
    *(
        _Entry(
            f"read-{bits}",
            cpu=partial(cpu_probes.ReadWeights, fmt),
            cuda=partial(cuda_probes.ReadWeights, fmt),
        )
        for bits, fmt in _READ_FORMATS.items()
    ),
    *(
        _Entry(
            floor_kernel(bits, overlaps=True),
            cuda=partial(cuda_probes.ReadWeights, fmt, overlap=True),
        )
        for bits, fmt in _READ_FORMATS.items()
    ),
    _Entry("empty", cpu=cpu_probes.EmptyKernel, cuda=cuda_probes.EmptyKernel),
    _Entry("spin", cuda=cuda_probes.Spin),
)


_external: dict[str, _Entry] = {}  # external kernels by label
_not_loaded: dict[str, str] = {}  # by package: the error with which its source failed to load


def add(kernels: Iterable[ExternalKernel]) -> None:
    """Register external kernels; one of the same label and backend is replaced.

    The cache of resolved kernels and their compiled functions is cleared.
    """
    for kernel in kernels:
        label, known = kernel.spec.label, _external.get(kernel.spec.label)
        entry = known or _Entry(label)
        factories: dict[str, Callable[[], Kernel]] = {
            kernel.spec.backend: partial(_identity, kernel)
        }
        _external[label] = replace(entry, **factories)  # type: ignore[arg-type]  # names are backends
    resolve.cache_clear()


def add_failure(package: str, reason: str) -> None:
    """Record the error of a source that failed to load, for messages about its unknown kernels.

    package: prefix of the names of its kernels.
    """
    _not_loaded.setdefault(package, reason)


def remove(external_labels: Iterable[str]) -> None:
    """Unregister external kernels; unknown labels are ignored."""
    for label in external_labels:
        _external.pop(label, None)
    resolve.cache_clear()


def external_labels() -> tuple[str, ...]:
    """Labels of the external kernels, on any backend."""
    _find_installed()
    return tuple(_external)


def labels(backend: Backend) -> tuple[str, ...]:
    """Labels of all kernels that this backend has, in registry order."""
    return tuple(entry.label for entry in _entries() if entry.factory(backend) is not None)


def list_kernels(backend: Backend) -> tuple[KernelSpec, ...]:
    """Return the spec of each kernel of this backend, in registry order."""
    return tuple(resolve(label, backend).spec for label in labels(backend))


@cache
def resolve(label: str, backend: Backend) -> Kernel:
    """Return the kernel of this label; one object per process, which caches compiled functions.

    Raises UnknownKernelError if no backend has it and UnsupportedError if only another backend has
    it.
    """
    entry = next((entry for entry in _entries() if entry.label == label), None)
    if entry is None:
        raise UnknownKernelError(_unknown(label))
    factory = entry.factory(backend)
    if factory is None:
        raise UnsupportedError(f"{label} has no {backend} implementation: see `list kernels`")
    return factory()


def _entries() -> tuple[_Entry, ...]:
    _find_installed()
    return (*_ENTRIES, *_external.values())


@cache
def _find_installed() -> None:
    """Register the kernels of installed packages, once per process."""
    known = dict(_external)
    add(installed.kernels())
    _external.update(known)


def _identity(kernel: Kernel) -> Kernel:
    return kernel


def _unknown(label: str) -> str:
    """Return the message for a label that is not registered."""
    known = [entry.label for entry in _entries()]
    name, variant = parse_kernel_label(label)
    variants = [entry for entry in known if parse_kernel_label(entry)[0] == name]
    if variant and variants:
        return f"{name} has no variant {variant!r}: there are {', '.join(variants)}"
    package, dot, _ = name.partition(".")
    if dot and package in _not_loaded:
        return f"no kernel {label!r}: {_not_loaded[package]}"
    if dot:
        of_package = [entry for entry in known if entry.startswith(f"{package}.")]
        near = difflib.get_close_matches(label, of_package, n=_SUGGESTIONS, cutoff=0.0)
        return (
            f"no kernel {label!r}: {package} has {', '.join(near) or 'none'} here; a renamed "
            "kernel is compared only while it has its old name, too"
        )
    near = difflib.get_close_matches(label, known, n=_SUGGESTIONS, cutoff=0.0)
    omitted = len(known) - len(near)
    return (
        f"no kernel {label!r}: there are {', '.join(near)} and {omitted} more: "
        "see `flexq-bench list kernels`"
    )

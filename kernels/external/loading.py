"""Kernels of a source, named after its package, ready to run in this process."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from inspect import getattr_static
from types import ModuleType

from flexq_bench.kernels.contract import (
    ExternalKernel,
    LinearKernel,
    OperationKernel,
    is_plain,
)
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external.function_kernel import FunctionDefinition
from flexq_bench.kernels.external.sources import (
    KernelSource,
    guarded_import,
    hash_of_module,
    normalized,
)
from flexq_bench.kernels.reference import BF16_BITS, FP16_BITS

ENTRY_POINTS = "flexq_bench.kernels"
# Labels of one kernel, as in `parse_kernel_label`, which also reads globs.
_LONGEST = 120
_LABEL = re.compile(rf"(?=.{{1,{_LONGEST}}}$)[a-z0-9-]+\.[a-z0-9][a-z0-9.-]*(\[[a-z0-9+.,-]+\])?")
# Significant bits that a kernel may round terms and results to.
ROUNDED_BITS = range(BF16_BITS, FP16_BITS + 1)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """Named kernels of a source. printed: its output on stdout during the import."""

    kernels: tuple[ExternalKernel, ...]
    printed: str = ""


def load(source: KernelSource) -> LoadedKernels:
    """Import a source and name its kernels.

    Its kernels are the functions that it decorates, and the module-level values, also in lists,
    that are decorated functions or LinearKernels. Raises SourceError with one line for any error.
    """
    printed = io.StringIO()
    with guarded_import(source.place), contextlib.redirect_stdout(printed):
        module, sources = source.imported()
        kernels = tuple(named_kernels(vars(module), source.prefix, sources))
    if not kernels:
        raise SourceError(
            f"{source.place} has no kernel: decorate a function with flexq_bench.api.kernel"
        )
    return LoadedKernels(kernels, printed.getvalue())


def load_installed() -> Iterator[ExternalKernel]:
    """Yield kernels of installed packages with an entry point in the group `flexq_bench.kernels`.

    An entry point names a module, or one kernel in it. A package that does not import is left out,
    with one line in the log.
    """
    # First a search in a third of the time of entry_points: each process that measures does this.
    texts = (package.read_text("entry_points.txt") for package in metadata.distributions())
    is_any = any(ENTRY_POINTS in (text or "") for text in texts)
    for point in metadata.entry_points(group=ENTRY_POINTS) if is_any else ():
        package = point.dist.name if point.dist is not None else point.module
        what = f"{package}'s entry point {point.name}"
        try:
            with guarded_import(what), contextlib.redirect_stdout(io.StringIO()):
                value = point.load()
                is_module = isinstance(value, ModuleType)
                module = value if is_module else __import__(point.module, fromlist=["_"])
                values = vars(value) if is_module else {point.name: value}
                kernels = tuple(named_kernels(values, package, hash_of_module(module)))
        except SourceError as error:
            log.warning("%s", error)
            continue
        yield from kernels


def named_kernels(
    values: dict[str, object], package: str, source_hash: str
) -> Iterator[ExternalKernel]:
    """Yield the kernels among the values of a module, each once, as `<package>.<name>`.

    Raises SourceError for a name that is no valid label, or that two kernels of a backend have, and
    for a spec by which nearly any result or time would be right.
    """
    taken: set[tuple[str, str]] = set()
    seen: set[int] = set()
    for value in _flat(values.values()):
        if id(value) in seen:
            continue
        seen.add(id(value))
        for kernel in _kernels_of(value):
            named = _named(kernel, package, source_hash)
            key = (named.spec.label, named.spec.backend)
            if key in taken:
                raise SourceError(
                    f"{package} has two kernels {kernel.spec.label} for {key[1]}: rename one"
                )
            taken.add(key)
            yield named


def refuse_taken(
    kernels: Iterable[ExternalKernel],
    source: KernelSource,
    owners: dict[tuple[str, str], KernelSource],
) -> None:
    """Add the kernels of a source to the owners of labels, by label and backend.

    Raises SourceError if another source has one of them.
    """
    for spec in (kernel.spec for kernel in kernels):
        first = owners.setdefault((spec.label, spec.backend), source)
        if first != source:
            raise SourceError(
                f"{source.place} and {first.place} both have {spec.label} for {spec.backend}: "
                "rename one"
            )


def _flat(values: Iterable[object]) -> Iterator[object]:
    """Yield values, and the items of lists and tuples in their place."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _kernels_of(value: object) -> tuple[ExternalKernel, ...]:
    if isinstance(value, FunctionDefinition):
        return value.kernels()
    return (value,) if isinstance(value, LinearKernel | OperationKernel) else ()


def _named(kernel: ExternalKernel, package: str, source_hash: str) -> ExternalKernel:
    spec = kernel.spec
    if not is_plain(spec):
        raise SourceError(f"{package}: the spec of a kernel must be a KernelSpec of NumberFormats")
    if spec.rounds_to is not None and spec.rounds_to not in ROUNDED_BITS:
        raise SourceError(
            f"{package}: {spec.label}: rounds_to must be {ROUNDED_BITS[0]} (as BF16) to "
            f"{ROUNDED_BITS[-1]} (as FP16) bits, got {spec.rounds_to!r}"
        )
    if spec.operation == "linear" and not spec.reads_weights:
        raise SourceError(f"{package}: {spec.label}: leave out reads_weights=False of its spec")
    own = replace(spec, name=f"{normalized(package)}.{spec.name}", source_hash=source_hash)
    if not _LABEL.fullmatch(own.label):
        raise SourceError(
            f"{package}: a kernel's name has lower-case letters, digits, dots and hyphens, and its "
            f"variant also + and commas, at most {_LONGEST} with the prefix, got {spec.label!r:.80}"
        )
    named = copy.copy(kernel)
    named.spec = own
    # A property, for example, could give another spec to the checks.
    is_property = hasattr(getattr_static(named, "spec"), "__get__")
    if is_property or type(named).__getattribute__ is not object.__getattribute__:
        raise SourceError(f"{own.label}: spec must be a plain attribute of the kernel")
    return named

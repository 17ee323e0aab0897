"""Packages with external kernels: checks of their installed versions, and import."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType

import torch

from flexq_bench.kernels.errors import UnsupportedError, first_line


@dataclass(frozen=True, slots=True)
class Package:
    """A third-party package. versions: those supported; module: its import name."""

    name: str
    module: str
    versions: str


BITSANDBYTES = Package("bitsandbytes", "bitsandbytes", ">=0.50,<0.51")
TORCHAO = Package("torchao", "torchao", ">=0.16,<0.20")
HUMMING = Package("humming-kernels", "humming", ">=0.1.19,<0.2")
PACKAGES = (BITSANDBYTES, TORCHAO, HUMMING)


def check(package: Package) -> None:
    """Raise UnsupportedError, with the reason, unless a supported version is installed."""
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        raise UnsupportedError(
            f"{package.name} is not installed: pip install 'flexq-bench[peers]'"
        ) from None
    from packaging.specifiers import SpecifierSet  # a sixth of the import time of flexq_bench.api

    if not SpecifierSet(package.versions).contains(version, prereleases=True):
        raise UnsupportedError(
            f"{package.name} {version} is not supported: install {package.versions}"
        )


@cache
def load(package: Package, submodule: str = "") -> ModuleType:
    """Import a module of a package. Raises UnsupportedError, with the reason, on failure."""
    check(package)
    name = f"{package.module}.{submodule}" if submodule else package.module
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package built for another torch or CUDA may raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UnsupportedError(
            f"{package.name} can't be imported ({reason}): install one for this torch"
        ) from error


def store(y: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Copy a package's output [M, >= N] to `out`, for packages without an output argument."""
    out.copy_(y[:, : out.shape[1]])
    if bias is not None:
        out += bias

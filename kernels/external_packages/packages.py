"""Packages with external kernels: checks of their installed versions, and import."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import ModuleType

from flexq_bench.kernels.errors import UnsupportedError, first_line

_NAME = re.compile(r"[A-Za-z0-9._-]*[A-Za-z0-9]")


@dataclass(frozen=True, slots=True)
class Package:
    """A third-party package. versions: those supported; module: its import name."""

    name: str
    module: str
    versions: str

    @staticmethod
    def of(requirement: str) -> Package | None:
        """Return the package of a requirement, as `torchao>=0.16,<0.20`; None: of nothing."""
        if not requirement:
            return None
        name = _NAME.match(requirement)
        if name is None:
            raise UnsupportedError(f"{requirement!r} names no package: write torchao>=0.16")
        return Package(name[0], name[0].replace("-", "_"), requirement[name.end() :].strip())


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

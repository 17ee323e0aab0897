"""Exceptions that this package raises.

KernelError
├── ShapeError          operands that don't fit each other or the kernel
├── UnknownKernelError  no such name or variant in the registry
├── UnsupportedError    the kernel exists but not for this device, stage or missing package
├── CompileError        NVRTC failed to compile a source
├── CacheError          the cache folder can't be written
└── SourceError         kernels of a file or package from outside can't be loaded
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of everything that kernels/ raises on purpose."""


class ShapeError(KernelError, ValueError):
    """Operands that don't fit each other or the kernel."""


class UnknownKernelError(KernelError, LookupError):
    """No such kernel or variant; the message names the nearest ones."""


class UnsupportedError(KernelError):
    """The kernel is known, but not for this device or stage, or a package is missing."""


class CompileError(KernelError):
    """NVRTC refused a source; the message has its log."""


class CacheError(KernelError):
    """The cache folder can't be made or written: a file has its name, or permissions forbid it."""


class SourceError(KernelError):
    """A file, module or package from outside whose kernels can't be had; one line says why."""

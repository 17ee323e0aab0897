"""Exceptions that this package raises.

KernelError
├── ShapeError          operands that don't fit each other or the kernel
├── UnknownKernelError  no such name or variant in the registry
├── UnsupportedError    the kernel exists but not for this device, stage or missing package
├── CompileError        NVRTC failed to compile a source
├── CacheError          the cache folder can't be written
└── SourceError         kernels of an external file or package can't be loaded
"""

from __future__ import annotations

_MAX_CHARACTERS = 500  # of a message of external code


class KernelError(Exception):
    """Base class of all exceptions that kernels/ raises."""


class ShapeError(KernelError, ValueError):
    """Operands that don't fit each other or the kernel."""


class UnknownKernelError(KernelError, LookupError):
    """No such kernel or variant; the message lists the closest names."""


class UnsupportedError(KernelError):
    """The kernel is known, but not for this device or stage, or a package is missing."""


class CompileError(KernelError):
    """NVRTC could not compile a source; the message contains its log."""


class CacheError(KernelError):
    """The cache folder can't be created or written, for example for lack of permissions."""


class SourceError(KernelError):
    """Kernels of an external file, module or package can't be loaded; the message says why."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, truncated. Never raises."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # __str__ of external code may raise anything
        lines = []
    line = lines[0] if lines else "no message"
    return line if len(line) <= _MAX_CHARACTERS else f"{line[: _MAX_CHARACTERS - 2]} …"

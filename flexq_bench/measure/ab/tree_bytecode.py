"""Bytecode of a checkout's modules, so that not each of its processes compiles them.

Code of both sides runs in folders that it can't write to, and with a new one for each comparison.
"""

from __future__ import annotations

import importlib.util
import py_compile
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import flexq_bench

_ROOT = Path(flexq_bench.__file__).resolve().parents[1]
_HEADER = struct.Struct("<4sIII")  # PEP 552: magic, flags, time of change, size of the source
_MASK = 0xFFFFFFFF
# The last two: of a text that is too deep for the parser.
_FAILURES = (OSError, ValueError, py_compile.PyCompileError, RecursionError, MemoryError)


def add_bytecode(tree: Path) -> None:
    """Write the bytecode of a tree's modules, of those that this process has loaded of its own.

    None of the tree's code runs. Modules of equal text get a copy of this program's bytecode. One
    that does not compile is left out: its import says why.
    """
    for own in _loaded():
        source = tree / own.relative_to(_ROOT)
        if source.is_file():
            with suppress(*_FAILURES):
                _add(source, own)


def _loaded() -> Iterator[Path]:
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is not None and file.endswith(".py") and Path(file).is_relative_to(_ROOT):
            yield Path(file)


def _add(source: Path, own: Path) -> None:
    cached = Path(importlib.util.cache_from_source(str(source)))
    code = _code_of(own) if source.read_bytes() == own.read_bytes() else None
    if code is None:
        py_compile.compile(str(source), str(cached), doraise=True, quiet=1)
        return
    cached.parent.mkdir(exist_ok=True)
    part = cached.with_suffix(".part")  # a server may be importing the module
    part.write_bytes(_header(source) + code)
    part.replace(cached)


def _code_of(source: Path) -> bytes | None:
    """The valid bytecode that a module was loaded from; None: there is none."""
    try:
        content = Path(importlib.util.cache_from_source(str(source))).read_bytes()
    except (OSError, NotImplementedError):
        return None
    header = _header(source)
    return content[len(header) :] if content.startswith(header) else None


def _header(source: Path) -> bytes:
    status = source.stat()
    changed, size = int(status.st_mtime) & _MASK, status.st_size & _MASK
    return _HEADER.pack(importlib.util.MAGIC_NUMBER, 0, changed, size)

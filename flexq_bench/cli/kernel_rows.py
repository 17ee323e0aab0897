"""Rows of `list kernels`; stored ones are read without the import of torch and of the kernels."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flexq_bench.kernels.errors import CacheError
from flexq_bench.kernels.runtime.files import cache_folder, write_atomically

_FILE = "kernel-list.json"
_SOURCES = ("kernels", "workloads")  # folders that decide what the registry has


def stored_kernel_rows() -> list[dict[str, Any]]:
    """Return kernel_rows, from the cache folder if nothing changed that they depend on.

    They are not stored with external kernels, whose files may be anywhere.
    """
    file, state = cache_folder() / _FILE, _state()
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(file.read_bytes())
        if stored["state"] == state:
            return list(stored["rows"])
    rows = kernel_rows()
    from flexq_bench.kernels.registry import external_labels

    if not external_labels():
        with suppress(CacheError, OSError):
            write_atomically(file, json.dumps({"state": state, "rows": rows}).encode())
    return rows


def kernel_rows() -> list[dict[str, Any]]:
    """Return a row of each kernel of the registry, those of CUDA first."""
    from flexq_bench.kernels.registry import list_kernels

    return [
        {
            "kernel": spec.label,
            "operation": spec.operation,
            "backend": spec.backend,
            "weights": spec.weight.name,
            "activations": spec.activation.name,
            "stages": list(spec.stages),
            "capability": "" if spec.backend == "cpu" else "{}.{}".format(*spec.min_capability),
            "version": spec.source_hash or spec.version,
            "summary": spec.summary,
        }
        for backend in ("cuda", "cpu")
        for spec in list_kernels(backend)
    ]


def _state() -> str:
    """Hash the state of the sources, of Python, and of the installed packages."""
    top = Path(__file__).resolve().parents[1]
    packages = set()
    for folder in map(os.path.abspath, sys.path):
        with suppress(OSError), os.scandir(folder) as entries:
            packages |= {_line(entry) for entry in entries if entry.name.endswith("-info")}
    sources = (line for name in _SOURCES for line in _files(top / name))
    parts = [sys.version, *sorted(packages), *sources]
    return hashlib.sha256("\n".join(parts).encode(errors="surrogateescape")).hexdigest()


def _files(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(Path(entry.path))
            else:
                yield _line(entry)


def _line(entry: os.DirEntry[str]) -> str:
    status = entry.stat()
    return f"{entry.path} {status.st_mtime_ns} {status.st_size}"

"""Cache of quantized checkpoints for decoding, one folder each; the least recently used is evicted.

A key is a hash of everything that determines a checkpoint's bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint
from flexq_bench.errors import UsageError
from flexq_bench.kernels.runtime.files import cache_folder, only_process
from flexq_bench.schemes.model_files import CONFIG, ModelFiles
from flexq_bench.schemes.scheme import Scheme

MAX_BYTES = 64 << 30  # total; a larger checkpoint stays until the next one is added
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Options of the calibration text. length: tokens per segment; None: the context."""

    text: str
    segments: int
    length: int | None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file, or the name of a data set on the hub."""
        path = Path(os.path.expanduser(self.text.rpartition(":")[2]))
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else self.text


def key_of(
    files: ModelFiles, scheme: Scheme, seed: int, calibration: CalibrationText | None, backend: str
) -> str:
    """Hash everything that determines a checkpoint's bytes, as 32 hexadecimal digits.

    Weight files are represented by size and modification time, because reading them takes minutes.
    backend: affects rounding in calibration.
    """
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files.weights]
    described = {
        "folder": str(files.folder.resolve()),
        "weights": stats,
        "config": _digest(files.folder / CONFIG),
        "tokenizer": [_digest(path) for path in files.tokenizer_files()],
        "scheme": (type(scheme).__name__, scheme.version, asdict(scheme.options), seed),
        "calibration": None
        if calibration is None or not scheme.needs_calibration
        else (calibration.fingerprint, calibration.segments, calibration.length),
        "backend": backend,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


class CheckpointCache:
    """A cache of checkpoints.

    folder None: in the user's cache folder. max_bytes: limit of the total size.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.folder = folder or cache_folder() / "checkpoints"
        self._max_bytes = max_bytes

    @property
    def limit(self) -> str:
        return f"{self._max_bytes / _GIB:g} GiB"

    def get(self, key: str, make: Callable[[Path], None]) -> tuple[Path, bool]:
        """Return the folder of this key's checkpoint; True: it existed, else `make` wrote it.

        A lock ensures that only one process creates it.
        """
        path = self.folder / key
        with only_process(self.folder / f"{key}.lock"):
            was_there = _is_complete(path)
            if not was_there:
                shutil.rmtree(path, ignore_errors=True)  # what an interruption or damage left
                make(path)
            os.utime(path)
        self._shrink(path)
        return path, was_there

    def _shrink(self, keep: Path) -> None:
        by_use = sorted(
            (path for path in self.folder.iterdir() if path.is_dir()),
            key=lambda path: path.stat().st_mtime_ns,
            reverse=True,
        )
        bytes_left = self._max_bytes - _bytes(keep)
        for path in by_use:
            if path == keep:
                continue
            bytes_left -= _bytes(path)
            if bytes_left < 0:
                shutil.rmtree(path, ignore_errors=True)
                path.with_suffix(".lock").unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    try:
        return is_checkpoint(path) and bool(open_checkpoint(path).layers)
    except UsageError:
        return False


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

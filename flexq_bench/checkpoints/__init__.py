"""Quantized checkpoints: the same bytes are evaluated, timed, gated and shipped.

`open_checkpoint` reads a folder, `CheckpointWriter` writes one, with one shard in memory at a time.
docs/checkpoints.md describes the format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexq_bench.checkpoints.folders import is_checkpoint
from flexq_bench.checkpoints.reader import open_checkpoint

if TYPE_CHECKING:
    from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
    from flexq_bench.checkpoints.config import StoredCalibration, StoredScheme
    from flexq_bench.checkpoints.errors import CheckpointError
    from flexq_bench.checkpoints.writer import CheckpointWriter

__all__ = [
    "CheckpointError",
    "CheckpointWriter",
    "QuantizedCheckpoint",
    "StoredCalibration",
    "StoredScheme",
    "is_checkpoint",
    "open_checkpoint",
]

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointWriter": "writer",
    "QuantizedCheckpoint": "checkpoint",
    "StoredCalibration": "config",
    "StoredScheme": "config",
}


def __getattr__(name: str) -> object:
    """Import names that need torch on first use."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

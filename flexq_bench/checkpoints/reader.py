"""Open a quantized checkpoint: its structure is checked at once, each tensor's bytes when read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flexq_bench.errors import UsageError

if TYPE_CHECKING:
    from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint

_CONFIG, _QUANTIZATION, _SECTION = "config.json", "quantization_config", "flexq_bench"


def is_checkpoint(path: Path | str) -> bool:
    """True if the folder's config.json says that flexq-bench quantized it. Imports no torch."""
    try:
        config = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
        return _SECTION in config[_QUANTIZATION]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return False


def open_checkpoint(path: Path | str) -> QuantizedCheckpoint:
    """Open a folder that `flexq-bench quantize` wrote.

    Checked at once: the configuration, that shards are whole, that their tensors are those of the
    configuration, and the content hash over the tensors' digests. The bytes of a tensor are
    compared with its digest when it is read.
    Raises CheckpointError in one line, and UsageError if there is no checkpoint.
    """
    from flexq_bench.checkpoints.stored import StoredCheckpoint

    folder = Path(os.path.expanduser(path))
    if not is_checkpoint(folder):
        raise UsageError(
            f"{folder} holds no quantized checkpoint: make one with flexq-bench quantize"
        )
    return StoredCheckpoint(folder)

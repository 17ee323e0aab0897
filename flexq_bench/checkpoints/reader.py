"""Open a quantized checkpoint: its structure is checked at once, each tensor's bytes when read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.errors import UsageError

if TYPE_CHECKING:
    from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint

_CONFIG, _SECTION = "config.json", "flexq_bench"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # the second one in 2024


def is_checkpoint(path: Path | str) -> bool:
    """True if the folder's config.json says that it is quantized, by whomever. Imports no torch."""
    return _quantization(_config(path)) is not None


def open_checkpoint(path: Path | str) -> QuantizedCheckpoint:
    """Open a folder that `flexq-bench quantize` wrote, or one of others that is read here.

    Checked at once: the configuration, that shards are whole, that their tensors are those of the
    configuration, and of ours the content hash over the tensors' digests. The bytes of a tensor are
    compared with its digest when it is read.
    Raises CheckpointError in one line, and UsageError if there is no checkpoint.
    """
    folder = Path(os.path.expanduser(path))
    config = _config(folder)
    quantization = _quantization(config)
    if quantization is None:
        raise UsageError(
            f"{folder} holds no quantized checkpoint: make one with flexq-bench quantize"
        )
    if isinstance(quantization, dict) and _SECTION in quantization:
        from flexq_bench.checkpoints.stored import StoredCheckpoint

        return StoredCheckpoint(folder)
    from flexq_bench.checkpoints.foreign.checkpoint import ForeignCheckpoint

    return ForeignCheckpoint(folder, config, quantization)


def _config(path: Path | str) -> dict[str, Any]:
    """config.json of a folder; empty if there is none that can be read."""
    try:
        config = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _quantization(config: dict[str, Any]) -> Any:
    """What a configuration says of quantization; None: nothing."""
    given = (config.get(key) for key in QUANTIZATION_KEYS)
    return next((section for section in given if section is not None), None)

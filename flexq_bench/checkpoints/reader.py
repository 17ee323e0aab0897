"""Open a quantized checkpoint: check its structure at once, and each tensor's bytes when read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flexq_bench.checkpoints.folders import is_own_checkpoint, read_config
from flexq_bench.errors import UsageError
from flexq_bench.schemes.model_files import CONFIG, read_json

if TYPE_CHECKING:
    from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint


def open_checkpoint(path: Path | str) -> QuantizedCheckpoint:
    """Open a folder that `flexq-bench quantize` or a supported other tool wrote.

    These are checked at once: the configuration; that shards are complete; that their tensors are
    those of the configuration; and for our folders the content hash over the tensors' digests. The
    bytes of a tensor are compared with its digest when it is read. Raises CheckpointError with one
    line, and UsageError if there is no checkpoint.
    """
    folder = Path(os.path.expanduser(path))
    config, section = read_config(folder)
    if section is None:
        if (folder / CONFIG).is_file():
            read_json(folder / CONFIG)  # it may be damaged
        if folder.suffix == ".gguf":
            raise UsageError(
                f"{folder} is a GGUF file: give it as the model, and its original with --reference"
            )
        raise UsageError(
            f"{folder} holds no quantized checkpoint: make one with flexq-bench quantize"
        )
    if is_own_checkpoint(folder):
        from flexq_bench.checkpoints.stored import StoredCheckpoint

        return StoredCheckpoint(folder)
    from flexq_bench.checkpoints.external.checkpoint import ExternalCheckpoint

    return ExternalCheckpoint(folder, config, section)

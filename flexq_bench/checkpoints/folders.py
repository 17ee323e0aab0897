"""File names and config.json of a checkpoint folder, which identify it as a checkpoint.

Imports no torch: the command line inspects folders before it knows whether it needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_CONFIG, _SECTION = "config.json", "flexq_bench"
_QUANTIZATION = ("quantization_config", "compression_config")  # the second one in 2024


def is_checkpoint(path: Path | str) -> bool:
    """True if the folder's config.json says that it is quantized, by whomever."""
    _, section = read_config(path)
    return section is not None


def is_own_checkpoint(path: Path | str) -> bool:
    """True if the folder's config.json says that flexq-bench quantized it."""
    _, section = read_config(path)
    return isinstance(section, dict) and _SECTION in section


def read_config(path: Path | str) -> tuple[dict[str, Any], Any]:
    """config.json of a folder, and apart from it what it says of quantization; None: nothing.

    Empty if there is none that can be read.
    """
    try:
        config = json.loads((Path(path) / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        config = {}
    if not isinstance(config, dict):
        config = {}
    given = (config.get(key) for key in _QUANTIZATION)
    section = next((section for section in given if section is not None), None)
    return {key: value for key, value in config.items() if key not in _QUANTIZATION}, section

"""File names and config.json of a checkpoint folder, which identify it as a checkpoint.

Imports no torch: the command line inspects folders before it knows whether it needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexq_bench.schemes.strict_json import loads_strictly

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_CONFIG, _SECTION = "config.json", "flexq_bench"
_QUANTIZATION = ("quantization_config", "compression_config")  # the second one in 2024
# Files of their own, by quant_method: of AutoGPTQ to 0.7 and of AutoAWQ to 0.1, beside a
# config.json that says nothing of it.
_OWN_FILES = {"gptq": "quantize_config.json", "awq": "quant_config.json"}


def is_checkpoint(path: Path | str) -> bool:
    """True if the folder's config.json says that it is quantized, by whomever."""
    _, section = read_config(path)
    return section is not None


def is_own_checkpoint(path: Path | str) -> bool:
    """True if the folder's config.json says that flexq-bench quantized it."""
    _, section = read_config(path)
    return isinstance(section, dict) and _SECTION in section


def read_config(path: Path | str) -> tuple[dict[str, Any], Any]:
    """config.json of a folder, and apart from it what is said of quantization; None: nothing.

    Early AutoGPTQ and AutoAWQ say it in a file of its own. Empty if there is none that can be read.
    """
    config = _object(Path(path) / _CONFIG)
    given = (config.get(key) for key in _QUANTIZATION)
    section = next((section for section in given if section is not None), None)
    if section is None and config:
        for method, name in _OWN_FILES.items():
            if own := _object(Path(path) / name):
                section = {"quant_method": method, **own}
                break
    return {key: value for key, value in config.items() if key not in _QUANTIZATION}, section


def _object(path: Path) -> dict[str, Any]:
    """A JSON object of a file; empty if there is none."""
    try:
        content = loads_strictly(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

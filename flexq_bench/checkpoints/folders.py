"""File names and config.json that identify a folder as a checkpoint.

Imports no torch: the command line inspects folders before it knows whether it needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexq_bench.schemes.model_files import CONFIG
from flexq_bench.schemes.strict_json import loads_strictly

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
_MLX = "quantization"
_SECTION = "flexq_bench"
_QUANTIZATION = ("quantization_config", "compression_config")  # the second name was used in 2024
# Separate files of AutoGPTQ up to 0.7, AutoAWQ up to 0.1, NVIDIA's Model Optimizer and
# optimum-quanto, whose config.json has no section, by quant_method.
_OWN_FILES = {
    "gptq": "quantize_config.json",
    "awq": "quant_config.json",
    "modelopt": "hf_quant_config.json",
    "quanto": "quanto_qmap.json",
}
HQQ_PICKLE = "qmodel.pt"


def is_checkpoint(path: Path | str) -> bool:
    """Return True if the folder's config.json has a quantization section of any tool."""
    _, section = read_config(path)
    return section is not None


def is_own_checkpoint(path: Path | str) -> bool:
    """Return True if flexq-bench quantized the folder, according to its config.json."""
    _, section = read_config(path)
    return isinstance(section, dict) and _SECTION in section


def read_config(path: Path | str) -> tuple[dict[str, Any], Any]:
    """config.json of a folder, and separately its quantization section; None: there is none.

    Some tools have a separate file for that section, and MLX another name. Both are empty if no
    file can be read.
    """
    config = _object(Path(path) / CONFIG)
    sections = (config.get(key) for key in _QUANTIZATION)
    section = next((section for section in sections if section is not None), None)
    if section is None or (isinstance(section, dict) and "quant_method" not in section):
        own = config.get(_MLX)
        if isinstance(own, dict) and "group_size" in own:  # MLX's, which has no quant_method
            section = {"quant_method": "mlx", **own}
    if section is None and (Path(path) / HQQ_PICKLE).is_file():
        section = {"quant_method": "hqq"}
    if section is None and config:
        for method, name in _OWN_FILES.items():
            if own := _object(Path(path) / name):
                section = {"quant_method": method, **own}
                break
    return {
        key: value for key, value in config.items() if key not in (*_QUANTIZATION, _MLX)
    }, section


def _object(path: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if there is none."""
    try:
        content = loads_strictly(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}

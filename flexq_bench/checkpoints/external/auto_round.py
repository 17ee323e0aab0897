"""AutoRound's folders (`quant_method` auto-round): layouts of other tools with settings of its own.

`packing_format` names the layout (auto_round/export/export_to_autoround/export.py, 0.16):

    auto_round:auto_gptq, auto_round:gptq            GPTQ, version 1
    auto_round, auto_round:gptqmodel, …:exllamav2    GPTQ, version 2 (zero points as they are)
    auto_round:auto_awq, auto_round:awq              AutoAWQ, gemm
    auto_round:llm_compressor                        compressed-tensors: MX formats, NVFP4

`extra_config` has other settings for single layers, by name or pattern; 16 bits: not quantized.
"""

from __future__ import annotations

import re
from typing import Any

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.autoawq import AwqLayers
from flexq_bench.checkpoints.external.compressed_tensors import CompressedTensorsLayers
from flexq_bench.checkpoints.external.gptq import GptqLayers
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import FolderTensors

METHOD = "auto-round"
_DENSE_BITS = 16
_PATTERN = re.compile(r"[*\\\[(|^$]")
_GROUPS = {"mx_fp": 32, "nv_fp": 16}  # values that share a scale


def auto_round_layers(tensors: FolderTensors, section: dict[str, Any]) -> LayerReader:
    """Layers of a folder of quant_method `auto-round`.

    Raises CheckpointError for unknown layouts, and settings that are none.
    """
    packing = str(section.get("packing_format") or section.get("backend") or "auto_round")
    extra = section.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(s, dict) for s in extra.values()):
        raise CheckpointError(f"{tensors.folder.name} has an extra_config that names no layers")
    kind = next((k for k in _GROUPS if str(section.get("data_type", "int")).startswith(k)), None)
    if kind is not None:
        reader: LayerReader = CompressedTensorsLayers(tensors, _as_compressed(section, extra, kind))
    elif str(section.get("data_type", "int")) != "int" or "fp8" in packing:
        raise CheckpointError(
            f"{tensors.folder.name} is AutoRound's {section.get('data_type')} in {packing}: read "
            "here are int, mx_fp and nv_fp; export it with format='llm_compressor'"
        )
    elif "awq" in packing:
        skipped = [f"re:{_pattern(name)}" for name, own in extra.items() if _is_dense(own)]
        reader = AwqLayers(tensors, {**section, "modules_to_not_convert": skipped})
    else:
        is_first = "gptq" in packing and "gptqmodel" not in packing
        dynamic = {
            ("-:" if _is_dense(settings) else "+:") + _pattern(name): settings
            for name, settings in extra.items()
        }
        layout = "gptq" if is_first else "gptq_v2"
        reader = GptqLayers(tensors, {**section, "checkpoint_format": layout, "dynamic": dynamic})
    reader.method = METHOD
    return reader


def _is_dense(settings: dict[str, Any]) -> bool:
    return settings.get("bits") is not None and int(settings["bits"]) >= _DENSE_BITS


def _pattern(name: str) -> str:
    """A pattern for a layer's name, or for names that contain the tool's pattern."""
    return f".*(?:{name})" if _PATTERN.search(name) else f"{re.escape(name)}$"


def _as_compressed(
    section: dict[str, Any], extra: dict[str, dict[str, Any]], kind: str
) -> dict[str, Any]:
    """The settings as compressed-tensors has them."""

    def arguments(bits: int) -> dict[str, Any]:
        scope, dynamic = ("group", True) if kind == "mx_fp" else ("tensor_group", "local")
        dtype = "uint8" if kind == "mx_fp" else "float8_e4m3fn"
        return {
            "num_bits": bits,
            "type": "float",
            "strategy": scope,
            "scale_dtype": dtype,
            "group_size": _GROUPS[kind],
            "dynamic": dynamic,
        }

    bits, of_inputs = section.get("bits", 4), section.get("act_bits", _DENSE_BITS) or _DENSE_BITS
    inputs = arguments(of_inputs) if of_inputs < _DENSE_BITS else None
    group = {
        "targets": ["Linear"],
        "weights": {**arguments(bits), "dynamic": False},
        "input_activations": inputs,
    }
    ignored = [f"re:{_pattern(name)}" for name, own in extra.items() if _is_dense(own)]
    return {"config_groups": {"group_0": group}, "ignore": ignored}

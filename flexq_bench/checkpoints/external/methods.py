"""The supported layouts, by `quant_method` of config.json."""

from __future__ import annotations

from typing import Any

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.autoawq import AwqLayers
from flexq_bench.checkpoints.external.compressed_tensors import CompressedTensorsLayers
from flexq_bench.checkpoints.external.folder import FolderTensors
from flexq_bench.checkpoints.external.gptq import GptqLayers
from flexq_bench.checkpoints.external.layer_reader import LayerReader

_METHODS = {reader.method: reader for reader in (CompressedTensorsLayers, AwqLayers, GptqLayers)}


def read_layers(tensors: FolderTensors, section: Any) -> LayerReader:
    """The quantized layers of a folder. section: `quantization_config` of its config.json.

    Raises CheckpointError with one line for an unsupported method or layout, and if no tensor is
    quantized.
    """
    method = section.get("quant_method") if isinstance(section, dict) else section
    reader = _METHODS.get(str(method))
    if reader is None or not isinstance(section, dict):
        raise CheckpointError(
            f"{tensors.folder.name} is quantized by {method}; read here are {', '.join(_METHODS)}, "
            "and GGUF files"
        )
    layers = reader(tensors, section)
    if not layers.names:
        raise CheckpointError(
            f"{tensors.folder.name} says that it is quantized by {method}, and none of its tensors "
            "is: copy the folder again"
        )
    return layers

"""A folder quantized by another tool, as a checkpoint for accuracy, decode and gates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.config import (
    DENSE_KV_BITS,
    QUANTIZATION,
    StoredScheme,
)
from flexq_bench.checkpoints.conversion import StoredNames
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.autoawq import AwqLayers
from flexq_bench.checkpoints.external.compressed_tensors import CompressedTensorsLayers
from flexq_bench.checkpoints.external.gptq import GptqLayers
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.checkpoints.hashing import content_hash, vocabulary_digests
from flexq_bench.checkpoints.model_source import check_block_count
from flexq_bench.checkpoints.safetensors_io import with_digest
from flexq_bench.checkpoints.stored import BLOCK
from flexq_bench.checkpoints.streaming import config_of, model_on_meta
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import CONFIG
from flexq_bench.schemes.quantized_layer import QuantizedLayer

# Tensors that early versions of transformers stored and now compute from the configuration; and the
# scales of a quantized KV cache, which remain in folders whose config.json no longer has that
# cache.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.k_scale", ".self_attn.v_scale")

# The supported layouts, by `quant_method` of config.json.
_METHODS = {reader.method: reader for reader in (CompressedTensorsLayers, AwqLayers, GptqLayers)}

log = logging.getLogger(__name__)


class ExternalCheckpoint(QuantizedCheckpoint):
    """Checkpoint of llm-compressor, AutoAWQ, AutoGPTQ or GPTQModel, from `open_checkpoint`.

    section: the quantization settings of config.json. config: the rest of it. Keys and values are
    cached in FP16. Quantized weights outside the blocks (output head, embeddings) are returned
    dequantized, in FP32: no scheme of this project quantizes them. Layers and
    tensors have their names in transformers, also if the files have others (Mixtral's experts).

    Raises CheckpointError with one line if the layout is not supported.
    """

    def __init__(self, folder: Path, config: dict[str, Any], section: Any) -> None:
        self.folder = folder
        self.config = config
        self._section = section
        self._tensors = FolderTensors(folder)
        self._layers = _read_layers(self._tensors, self._section)
        self._shapes, renamed = _names_and_shapes(config, self._tensors)
        # By their names here, the names of layers and tensors in the files.
        self._stored_layers = self._by_name(
            self._layers.names, lambda name: renamed(f"{name}.weight").removesuffix(".weight")
        )
        weights = {f"{name}.weight": name for name in self._stored_layers}
        self._dense_weights = {
            weight: name for weight, name in weights.items() if not BLOCK.search(f".{name}")
        }
        self.layers = tuple(
            name for weight, name in weights.items() if weight not in self._dense_weights
        )
        self._quantized = frozenset(self.layers)
        if not self.layers:
            raise CheckpointError(f"{folder} has no quantized layer in a block of a decoder")
        for name in self.layers:
            self._check_shape(name)
        owned = self._layers.owned()
        dense = (
            name
            for name in self._tensors.infos
            if name not in owned and not name.endswith(_IGNORED_SUFFIXES)
        )
        self._stored_tensors = self._by_name(dense, renamed)
        duplicate = next((name for name in self._stored_tensors if name in weights), None)
        if duplicate is not None:
            raise CheckpointError(
                f"{folder} has {duplicate} and the codes of that layer: which of them is meant? "
                "Copy the folder again"
            )
        self.tensor_names = tuple(sorted([*self._stored_tensors, *self._dense_weights]))
        self.kv_bits = DENSE_KV_BITS
        self.scheme = StoredScheme(name=self._scheme_name(), version=0)
        self._warn()

    @cached_property
    def content_hash(self) -> str:  # type: ignore[override]
        """SHA-256 over config.json, vocabulary and every tensor's bytes, all of which are read.

        Tensors that are read later are compared with the hashed ones.
        """
        self._tensors.infos = {
            name: with_digest(info, name) for name, info in self._tensors.infos.items()
        }
        section = {"config": self._section, "files": vocabulary_digests(self.folder)}
        return content_hash({**self.config, QUANTIZATION: section}, self._tensors.infos)

    def has_bias(self, name: str) -> bool:
        return f"{self._stored_layers[name]}.bias" in self._tensors

    def layer(self, name: str, device: torch.device | str = "cpu") -> QuantizedLayer:
        if name not in self._quantized:
            raise CheckpointError(f"{self.folder} has no quantized layer {name}")
        return self._layers.layer(self._stored_layers[name], device)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.tensor_names:
            raise CheckpointError(f"{self.folder} has no tensor {name}")
        if name in self._dense_weights:
            layer = self._layers.layer(self._stored_layers[self._dense_weights[name]])
            values = layer.weight.in_own_order()
            return values.to(torch.float32)  # exact: a code times an FP16 scale
        tensor = self._tensors.take(self._stored_tensors[name], (*REALS, torch.float64))
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.folder}: {name} holds NaN or infinity: copy it again")
        return tensor

    def _by_name(self, stored: Iterable[str], renamed: Callable[[str], str]) -> dict[str, str]:
        """Names in the files, by what they are called here. Raises CheckpointError for a pair."""
        by_name: dict[str, str] = {}
        for name in stored:
            other = by_name.setdefault(renamed(name), name)
            if other != name:
                raise CheckpointError(
                    f"{self.folder} has {other} and {name}, two names of one weight: copy the "
                    "folder again"
                )
        return by_name

    def _check_shape(self, name: str) -> None:
        expected = self._shapes.get(f"{name}.weight")
        shape = self._layers.shape(self._stored_layers[name])
        if expected is not None and shape != expected:
            raise CheckpointError(
                f"{self.folder}: {name} is {list(shape)}, its {CONFIG} asks for {list(expected)}: "
                "copy the folder again"
            )

    def _scheme_name(self) -> str:
        """The tool's method and the formats of the layers, for example `awq:uint4/128`."""
        names = {self._layers.formats(self._stored_layers[name]) for name in self.layers}
        return f"{self._layers.method}:{names.pop() if len(names) == 1 else 'mixed'}"

    def _warn(self) -> None:
        """Log values that are not used exactly as stored."""
        change = self._layers.scale_change()
        if change:
            log.warning(
                "%s: scales have more digits than FP16 and are rounded to it, by up to %.2g %%",
                self.folder.name,
                100 * change,
            )
        if self._dense_weights:
            log.warning(
                "%s: %s quantized in it: computed with the values that the codes stand for, by no "
                "kernel",
                self.folder.name,
                " and ".join(self._dense_weights.values())
                + (" are" if len(self._dense_weights) > 1 else " is"),
            )


def _names_and_shapes(
    config: Mapping[str, Any], tensors: FolderTensors
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], str]]:
    """Shapes of the model's tensors, and a function from names in files to names in the model.

    Nothing is known of a model that transformers can't build; those who load it report that. Raises
    CheckpointError for more blocks than tensors, because they would all be built.
    """
    try:
        described = config_of(config)
        check_block_count(tensors.folder.name, len(tensors.infos), described)
        model = model_on_meta(described)
    except CheckpointError:
        raise
    except Exception as error:  # of any class, for example an unknown model type
        log.debug("no names of a %s: %s", config.get("model_type"), error)
        return {}, str
    names = StoredNames(model, linear_origins(model))
    return {n: tuple(t.shape) for n, t in model.state_dict().items()}, names.separated


def _read_layers(tensors: FolderTensors, section: Any) -> LayerReader:
    """Return the quantized layers of a folder. section: `quantization_config` of its config.json.

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

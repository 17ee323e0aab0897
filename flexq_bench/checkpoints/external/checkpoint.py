"""A folder quantized by another tool, as a checkpoint for accuracy, decode and gates."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexq_bench.checkpoints.checkpoint import QuantizedCheckpoint
from flexq_bench.checkpoints.config import (
    DENSE_KV_BITS,
    QUANTIZATION,
    StoredScheme,
)
from flexq_bench.checkpoints.conversion import ConvertedTensors, StoredNames
from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.external.auto_round import METHOD, auto_round_layers
from flexq_bench.checkpoints.external.autoawq import AwqLayers
from flexq_bench.checkpoints.external.bitnet import BitNetLayers
from flexq_bench.checkpoints.external.bitsandbytes import BitsAndBytesLayers
from flexq_bench.checkpoints.external.compressed_tensors import CompressedTensorsLayers
from flexq_bench.checkpoints.external.fp8 import FbgemmLayers, Fp8Layers
from flexq_bench.checkpoints.external.gpt_oss import GptOssLayers
from flexq_bench.checkpoints.external.gptq import GptqLayers
from flexq_bench.checkpoints.external.hqq import HqqLayers
from flexq_bench.checkpoints.external.layer_reader import LayerReader
from flexq_bench.checkpoints.external.mlx import METAL, MlxLayers
from flexq_bench.checkpoints.external.modelopt import ModelOptLayers
from flexq_bench.checkpoints.external.quanto import QuantoLayers
from flexq_bench.checkpoints.external.torchao import TorchAoLayers
from flexq_bench.checkpoints.folder_tensors import REALS, FolderTensors
from flexq_bench.checkpoints.folders import HQQ_PICKLE
from flexq_bench.checkpoints.hashing import content_hash, vocabulary_digests
from flexq_bench.checkpoints.model_source import check_block_count
from flexq_bench.checkpoints.safetensors_io import TensorInfo, with_digests
from flexq_bench.checkpoints.stored import BLOCK
from flexq_bench.checkpoints.streaming import config_of, model_on_meta
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.schemes.linear_layers import linear_origins
from flexq_bench.schemes.model_files import CONFIG
from flexq_bench.schemes.quantized_layer import QuantizedLayer

# Tensors that early versions of transformers stored and now compute from the configuration.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
# Scales of cached keys and values in E4M3: of compressed-tensors, of NVIDIA's Model Optimizer, of
# AutoFP8, and of early versions of vLLM, which have one for both.
_CACHE_SCALES = (
    *((".k_scale", ".v_scale"), (".k_proj.k_scale", ".v_proj.v_scale")),
    *((".k_proj.output_scale", ".v_proj.output_scale"), (".kv_scale", ".kv_scale")),
)
_NUMBER = re.compile(r"\d+")
_ATTENTION = re.compile(r"\.(?P<block>\d+)\.[a-z_]*attn$")

_ReadLayers = Callable[[FolderTensors, dict[str, Any]], LayerReader]
_READERS: tuple[type[LayerReader], ...] = (
    *(CompressedTensorsLayers, AwqLayers, GptqLayers, Fp8Layers, ModelOptLayers, GptOssLayers),
    *(TorchAoLayers, BitsAndBytesLayers, QuantoLayers, MlxLayers, HqqLayers, BitNetLayers),
    FbgemmLayers,
)
# The supported layouts, by `quant_method` of config.json.
_METHODS: dict[str, _ReadLayers] = {
    **{reader.method: reader for reader in _READERS},
    **dict.fromkeys((METHOD, f"intel/{METHOD}"), auto_round_layers),
    METAL: MlxLayers,
}
_ORIGINAL = "evaluate the original with a scheme of flexq-bench list schemes"
_VECTORS = f"codes of vectors or of rotated weights, which are not read here: {_ORIGINAL}"
# Of layouts that are not read, what their files hold and what to do.
_REFUSED = {
    HQQ_PICKLE: "a pickled file, which may run code when it is read: save it as safetensors with "
    "transformers (HqqConfig)",
    "eetq": f"INT8 in an order for kernels of one kind of GPU: {_ORIGINAL}",
    "gemma": f"integers with rounded outputs, which are not computed here: {_ORIGINAL}",
    "fouroversix": f"tensors in an order that its package chooses: {_ORIGINAL}",
    "nvfp4": f"weights that transformers rounds when it loads them, and doesn't store: {_ORIGINAL}",
    "quark": "AMD Quark's tensors, whose layout depends on its types: export it as fp8 or awq",
    **dict.fromkeys(("aqlm", "vptq", "quip", "spqr", "higgs", "fp_quant", "sinq"), _VECTORS),
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Names:
    """A model's tensors, and how those of a folder become them.

    shapes: by name. renamed: the name of a tensor of the folder. is_part: a tensor of the folder
    that is converted, such as fused or packed layers. convert: these; None: the model is unknown.
    nonlinear: modules that are no linear layers, such as routers.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    renamed: Callable[[str], str] = str
    is_part: Callable[[str], bool] = lambda _: False
    convert: Callable[[Mapping[str, TensorInfo]], ConvertedTensors] | None = None
    nonlinear: frozenset[str] = frozenset()


class ExternalCheckpoint(QuantizedCheckpoint):
    """Checkpoint of another tool, from `open_checkpoint`.

    section: the quantization settings of config.json. config: the rest of it. Keys and values are
    cached in FP16, rounded to FP8 if the settings say so (`kv_cache_scheme`). Quantized weights
    outside the blocks (output head, embeddings), and of routers, are returned dequantized, in FP32:
    no scheme of this project quantizes them. Layers and tensors have their names in transformers,
    also if the files have others (Mixtral's experts).

    Raises CheckpointError with one line if the layout is not supported.
    """

    def __init__(self, folder: Path, config: dict[str, Any], section: Any) -> None:
        self.folder = folder
        self.config = config
        self._section = section
        read = _reader_of(folder, section)
        self._tensors = FolderTensors(folder)
        names = _names_of(config, self._tensors)
        self._shapes, renamed = names.shapes, names.renamed
        self._layers = read(self._tensors, section)
        self._layers.check_excluded()
        if not self._layers.names:
            raise CheckpointError(
                f"{folder.name} says that it is quantized by {section.get('quant_method')}, and "
                "none of its tensors is: copy the folder again"
            )
        # By their names here, the names of layers and tensors in the files.
        self._stored_layers = self._by_name(
            self._layers.names, lambda name: renamed(f"{name}.weight").removesuffix(".weight")
        )
        self._layers.expected = {
            stored: self._shapes[f"{name}.weight"]
            for name, stored in self._stored_layers.items()
            if f"{name}.weight" in self._shapes
        }
        weights = {f"{name}.weight": name for name in self._stored_layers}
        self._dense_weights = {
            weight: name
            for weight, name in weights.items()
            if not BLOCK.search(f".{name}") or name in names.nonlinear
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
            if name not in owned
            and not name.endswith((*_IGNORED_SUFFIXES, *itertools.chain(*_CACHE_SCALES)))
        )
        self._stored_tensors = self._by_name(dense, renamed)
        # Experts without codes that are packed in one tensor are several layers here.
        packed = {
            name: stored
            for name, stored in self._stored_tensors.items()
            if name not in self._shapes or names.is_part(stored)
        }
        infos = {stored: self._tensors.infos[stored] for stored in packed.values()}
        self._converted = names.convert(infos) if infos and names.convert is not None else None
        if self._converted is not None:
            for name in packed.keys() - set(self._converted.unused):
                del self._stored_tensors[name]
        duplicate = next((name for name in self._stored_tensors if name in weights), None)
        if duplicate is not None:
            raise CheckpointError(
                f"{folder} has {duplicate} and the codes of that layer: which of them is meant? "
                "Copy the folder again"
            )
        self._check_dense()
        converted = () if self._converted is None else self._converted.shapes
        self.tensor_names = tuple(sorted([*self._stored_tensors, *self._dense_weights, *converted]))
        self.kv_bits = DENSE_KV_BITS
        self._cache_scales = self._read_cache_scales()
        self.scheme = StoredScheme(name=self._scheme_name(), version=0)
        self._warn()

    @cached_property
    def content_hash(self) -> str:  # type: ignore[override]
        """SHA-256 over config.json, vocabulary and every tensor's bytes, all of which are read.

        Tensors that are read later are compared with the hashed ones.
        """
        self._tensors.infos = with_digests(self._tensors.infos)
        section = {"config": self._section, "files": vocabulary_digests(self.folder)}
        return content_hash({**self.config, QUANTIZATION: section}, self._tensors.infos)

    @cached_property
    def dense_formats(self) -> dict[str, NumberFormat]:  # type: ignore[override]
        """Formats of embeddings, heads and routers, and of layers without codes here."""
        formats = {
            f"{name}.weight": self._layers.nearest_format(stored)
            for name, stored in self._stored_layers.items()
        }
        for weight, name in self._dense_weights.items():
            stored = self._stored_layers[name]
            formats[weight] = formats[weight] or self._layers.layer(stored).weight_format
        return {name: number for name, number in formats.items() if number is not None}

    def has_bias(self, name: str) -> bool:
        return self._layers.has_bias(self._stored_layers[name])

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
            return values.to(torch.float32)
        if name in self._stored_tensors:
            tensor = self._tensors.take(self._stored_tensors[name], (*REALS, torch.float64))
        else:
            assert self._converted is not None
            ((_, tensor),) = self._converted.read([name], torch.device("cpu"))
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{self.folder}: {name} holds NaN or infinity: copy it again")
        return tensor

    def fp8_cache_scales(self, block: int) -> torch.Tensor | None:
        return self._cache_scales.get(block)

    def _read_cache_scales(self) -> dict[int, torch.Tensor]:
        """Scales by block, FP32 [2, KV heads] or [2, 1]; empty: there is no such cache.

        Raises CheckpointError if the configuration says that there is one, and a scale is missing,
        or is NaN, infinite or not above 0.
        """
        scales: dict[int, dict[int, torch.Tensor]] = {}
        for name in self._tensors.infos:
            for index, suffix in itertools.chain(*map(enumerate, _CACHE_SCALES)):
                place = _ATTENTION.search(name.removesuffix(suffix))
                if name.endswith(suffix) and place is not None:
                    scale = self._tensors.take(name, REALS).float().reshape(-1)
                    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                        raise CheckpointError(f"{name} holds NaN, infinity or 0: copy it again")
                    scales.setdefault(int(place["block"]), {})[index] = scale
        if not self._layers.has_fp8_cache():
            if scales:
                log.warning(
                    "%s: keys and values are cached in FP16: it has scales of an FP8 cache, and "
                    "nothing in its config.json asks for one (kv_cache_scheme)",
                    self.folder.name,
                )
            return {}
        blocks = self.config.get("num_hidden_layers")
        whole = all(len(pair) == 2 for pair in scales.values())
        if not whole or len(scales) != blocks:
            raise CheckpointError(
                f"{self.folder} has scales of an FP8 cache for {len(scales)} of {blocks} blocks "
                "(kv_cache_scheme): copy the folder again"
            )
        return {
            block: torch.stack([pair[0] + 0 * pair[1], pair[1] + 0 * pair[0]])
            for block, pair in scales.items()
        }

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

    def _check_dense(self) -> None:
        """Raise CheckpointError for a layer without codes that the configuration does not name.

        Only where the same layer of another block has codes: tools leave routers as they are, and
        layers whose sizes don't fit.
        """
        alike = {
            (_NUMBER.sub("", name), self._shapes.get(f"{name}.weight")) for name in self.layers
        }
        for name, stored in self._stored_tensors.items() if self._layers.names_all else ():
            layer, in_file = name.removesuffix(".weight"), stored.removesuffix(".weight")
            is_alike = (_NUMBER.sub("", layer), self._shapes.get(name)) in alike
            if is_alike and not self._layers.excluded_by(in_file, loosely=True):
                raise CheckpointError(
                    f"{self.folder.name}: {in_file} has no codes, and nothing in its config.json "
                    "says that it is not quantized: copy the folder again"
                )

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
        """Log values that no kernel computes with."""
        if self._dense_weights:
            log.warning(
                "%s: %s quantized in it: computed with the values that the codes stand for, by no "
                "kernel",
                self.folder.name,
                " and ".join(self._dense_weights.values())
                + (" are" if len(self._dense_weights) > 1 else " is"),
            )


def _names_of(config: Mapping[str, Any], tensors: FolderTensors) -> _Names:
    """Names of the model.

    Tensors that the architecture's class leaves out, such as those of blocks that predict several
    tokens, are removed. Nothing is known of a model that transformers can't build; those who load
    it report that. Raises CheckpointError for more blocks than tensors, because they would all be
    built.
    """
    try:
        described = config_of(config)
        check_block_count(tensors.folder.name, len(tensors.infos), described)
        model = model_on_meta(described)
    except CheckpointError:
        raise
    except Exception as error:  # of any class, for example an unknown model type
        log.debug("no names of a %s: %s", config.get("model_type"), error)
        return _Names()
    left_out = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    tensors.infos = {
        name: info
        for name, info in tensors.infos.items()
        if not any(pattern.search(name) for pattern in left_out)
    }
    origins = linear_origins(model)
    stored = StoredNames(model, origins)
    return _Names(
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        stored.separated,
        stored.is_part,
        partial(ConvertedTensors, model, origins),
        frozenset(n for n, module in model.named_modules() if not isinstance(module, nn.Linear)),
    )


def _reader_of(folder: Path, section: Any) -> _ReadLayers:
    """Return the reader of a folder's layout. section: `quantization_config` of its config.json.

    Raises CheckpointError with one line for a layout that is not read.
    """
    method = str(section.get("quant_method") if isinstance(section, dict) else section).lower()
    is_pickled = method == HqqLayers.method and (folder / HQQ_PICKLE).is_file()
    reader = _METHODS.get(method) if isinstance(section, dict) and not is_pickled else None
    if reader is None:
        known = f"read here are {', '.join(_METHODS)}, and GGUF files"
        raise CheckpointError(
            f"{folder.name} is quantized by {method:.40}: "
            f"{_REFUSED.get(HQQ_PICKLE if is_pickled else method, known)}"
        )
    return reader

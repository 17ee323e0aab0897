"""Configuration of a GGUF file: transformers' reading, completed by the keys that it ignores.

transformers maps some keys of an architecture and ignores the others, and also tensors that are not
part of the resulting model. This module sets such keys in the configuration if transformers can
compute them, and refuses the others.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Their meaning in llama.cpp:
src/llama-model.cpp and src/models; in its converter: convert_hf_to_gguf.py.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.kernels.formats import Kind, NumberFormat

_ROPE_FACTORS = "rope_freqs.weight"
_ORIGIN = "evaluate the safetensors that it was made from"
# Keys that repeat the shapes of tensors or other keys, or describe the file.
_REDUNDANT = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "expert_count", "expert_used_count"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length", "tensor_data_layout"),
    *("use_parallel_residual", "rope.scaling.finetuned", "expert_group_count"),
)
# Types of ggml: the bits of a code, and those whose groups have a smallest value or 16 values.
_CODE_BITS = re.compile(r"Q(\d)")
_SAME_FORMATS = ("mxfp4", "nvfp4")
_WITH_MINIMA = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
_GROUPS_OF_16 = ("Q2_K", "Q3_K", "Q6_K")
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
# Llama 3's scaling of rotary angles; the file has only the resulting factors:
# convert_hf_to_gguf.py, LlamaModel.generate_extra_tensors. All released models have these values.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# number of blocks by which llama.cpp recognizes that size
_BLOCKS_OF_27B = {"gemma2": 46, "gemma3_text": 62}


def complete_config(config: Any, reader: Any, path: Path) -> None:
    """Set keys of a GGUF file that transformers ignores in its configuration.

    config: a PretrainedConfig, which is changed. reader: gguf.GGUFReader of the file. Raises
    CheckpointError for keys that transformers can't compute as llama.cpp does.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import read_field

    architecture = str(read_field(reader, "general.architecture")[0])
    of_kind = f"{architecture}."
    mapping: Mapping[str, str | None] = GGUF_CONFIG_MAPPING.get(config.model_type) or {}
    mapping = GGUF_CONFIG_MAPPING.get(architecture) or mapping
    if not mapping or _is_mapped_whole(architecture):
        return
    keys: dict[str, Any] = {}
    for full in reader.fields:
        key = full.removeprefix(of_kind)
        values = read_field(reader, full) if full.startswith(of_kind) else []
        if mapping.get(key) not in (None, "head_dim"):
            continue  # transformers reads it
        if len(values) == 1:
            keys[key] = values[0]
        elif values and key not in _REDUNDANT:
            _refuse(path, f"{full} a layer")
    _Completion(config, path, architecture, keys).complete()
    tensors = {str(tensor.name): tensor for tensor in reader.tensors}
    _add_biases(config, tensors)
    if _ROPE_FACTORS in tensors:
        _add_rope_factors(config, np.asarray(tensors[_ROPE_FACTORS].data), path)


def check_tensors_used(names: Mapping[str, str], reader: Any, path: Path) -> None:
    """Raise CheckpointError if a tensor of the file is not part of the model.

    names: the model's tensors by those of the file, as transformers maps them.
    """
    unread = sorted(
        str(tensor.name)
        for tensor in reader.tensors
        if str(tensor.name) not in names
        and str(tensor.name).removesuffix(".weight") not in names  # experts, packed into one tensor
        and tensor.name != _ROPE_FACTORS
    )
    if unread:
        raise CheckpointError(
            f"{path.name} has {len(unread)} tensors that transformers doesn't read "
            f"({unread[0]} …): {_ORIGIN}"
        )


def nearest_format(kind: str) -> NumberFormat | None:
    """The format nearest to a type of ggml, `Q4_K`; None: it is dense.

    Scales of scales, and codes of vectors, have no format here.
    """
    if kind.lower() in _SAME_FORMATS:
        return NumberFormat.parse(kind.lower())
    bits = _CODE_BITS.search(kind)
    if bits is None:
        return None
    group = 16 if kind in _GROUPS_OF_16 else 32
    kinds: Kind = "asymmetric" if kind in _WITH_MINIMA else "symmetric"
    return NumberFormat(max(2, int(bits[1])), group, kinds)


def _is_mapped_whole(architecture: str) -> bool:
    """Return True for architectures of which newer versions of transformers read every key."""
    try:
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    except ImportError:
        return False
    return architecture in GGUF_CONFIG_ARCHS


class _Completion:
    """Sets the keys of an architecture that transformers ignores in its configuration."""

    def __init__(self, config: Any, path: Path, architecture: str, keys: Mapping[str, Any]) -> None:
        self._config, self._path, self._architecture = config, path, architecture
        self._keys = keys
        self._steps: dict[str, Callable[[Any], None]] = {
            "attention.key_length": self._head_dim,
            "attention.value_length": self._value_length,
            "attention.layer_norm_rms_epsilon": self._epsilon,
            "attention.layer_norm_epsilon": self._epsilon,
            "attention.causal": lambda value: self._must_be("attention.causal", True, value),
            "attention.sliding_window": self._sliding_window,
            "attn_logit_softcapping": self._attribute("attn_logit_softcapping"),
            "final_logit_softcapping": self._attribute("final_logit_softcapping"),
            "rope.dimension_count": self._rotary_width,
            "rope.freq_base": self._rotary_base,
        }

    def complete(self) -> None:
        known = {*self._steps, *_REDUNDANT}
        for key, step in self._steps.items():
            if key in self._keys:
                step(self._keys[key])
        self._query_scale()
        if "rope.scale_linear" in self._keys:  # before 2024
            self._scale_rotary("linear", float(self._keys["rope.scale_linear"]), {})
        elif any(key.startswith("rope.scaling.") for key in self._keys):
            scaling = {
                key.removeprefix("rope.scaling."): value
                for key, value in self._keys.items()
                if key.startswith("rope.scaling.") and key not in _REDUNDANT
            }
            kind = str(scaling.pop("type", "linear"))  # llama.cpp's default
            self._scale_rotary(kind, float(scaling.pop("factor", 1.0)), scaling)
        for key in sorted(self._keys.keys() - known):
            if not key.startswith(("rope.scaling.", "rope.scale_linear")):
                self._refuse(f"{key} {self._keys[key]!r:.40}")

    def _refuse(self, what: str) -> None:
        _refuse(self._path, f"{self._architecture}.{what}")

    def _must_be(self, key: str, wanted: Any, value: Any) -> None:
        if value != wanted:
            self._refuse(f"{key} {value!r:.40}")

    def _attribute(self, name: str) -> Callable[[Any], None]:
        def put(value: Any) -> None:
            if hasattr(self._config, name):
                setattr(self._config, name, value)
            else:
                self._refuse(f"{name} {value}")

        return put

    @property
    def _width(self) -> int:
        """Channels of a head."""
        config = self._config
        own = getattr(config, "head_dim", None)
        return int(own or config.hidden_size // config.num_attention_heads)

    def _head_dim(self, value: int) -> None:
        if value != self._width:
            if "head_dim" not in self._config.to_dict():
                self._refuse(f"attention.key_length {value}")
            self._config.head_dim = value

    def _value_length(self, value: int) -> None:
        self._must_be("attention.value_length", self._width, value)

    def _epsilon(self, value: float) -> None:
        name = next((name for name in _EPSILONS if hasattr(self._config, name)), None)
        if name is None:
            self._refuse(f"norm epsilon {value}")
        else:
            setattr(self._config, name, value)

    def _sliding_window(self, value: int) -> None:
        config = self._config
        if value == 0 or value >= config.max_position_embeddings:
            return
        if config.model_type in ("phi3", "mistral", "starcoder2"):
            config.sliding_window = value
        else:
            self._must_be("attention.sliding_window", getattr(config, "sliding_window", 0), value)

    def _rotary_width(self, value: int) -> None:
        rope = getattr(self._config, "rope_parameters", None) or {}
        part = rope.get("partial_rotary_factor")
        if part is not None:
            rope["partial_rotary_factor"] = value / self._width
        elif hasattr(self._config, "partial_rotary_factor"):
            self._config.partial_rotary_factor = value / self._width
        else:
            self._must_be("rope.dimension_count", self._width, value)

    def _rotary_base(self, value: float) -> None:
        rope = getattr(self._config, "rope_parameters", None)
        if isinstance(rope, dict) and "rope_theta" in rope:
            rope["rope_theta"] = value
        elif hasattr(self._config, "rope_theta"):
            self._config.rope_theta = value
        else:
            self._refuse(f"rope.freq_base {value}")

    def _scale_rotary(self, kind: str, factor: float, more: dict[str, Any]) -> None:
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return
        original = more.pop("original_context_length", None)
        is_known = kind == "linear" or (kind == "yarn" and original is not None and factor > 1)
        if not is_known or more or not factor > 0:
            self._refuse(f"rope.scaling.type {kind!r:.40}")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = original
        _set_rope(self._config, scaling, self._path)

    def _query_scale(self) -> None:
        """Gemma's scale of queries, which llama.cpp derives from other sizes."""
        config = self._config
        if hasattr(config, "query_pre_attn_scalar"):
            is_27b = config.num_hidden_layers == _BLOCKS_OF_27B.get(config.model_type)
            width = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = width if is_27b else self._width


def _add_biases(config: Any, names: Mapping[str, Any]) -> None:
    """Declare the biases of the file's tensors, because GGUF has no keys for them."""
    for attribute, tensors in (
        ("attention_bias", ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")),
        ("mlp_bias", ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")),
    ):
        if hasattr(config, attribute) and any(name.endswith(tensors) for name in names):
            setattr(config, attribute, True)


def _add_rope_factors(config: Any, factors: Any, path: Path) -> None:
    """Scale rotary angles as Llama 3.1 and later. factors: [head_dim / 2], their divisors."""
    largest = float(factors.max())
    if bool((factors == 1).all()):
        return
    scaling = {**_LLAMA3, "factor": largest}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    base = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    expected = [_llama3_factor(base ** (2 * i / width), scaling) for i in range(width // 2)]
    if factors.shape != (width // 2,) or not np.allclose(factors, expected, rtol=1e-5, atol=0):
        _refuse(path, f"{_ROPE_FACTORS} other than Llama 3's")
    _set_rope(config, {"rope_type": "llama3", **scaling}, path)


def _llama3_factor(inverse: float, scaling: Mapping[str, float]) -> float:
    """Factor of a rotary angle. inverse: number of tokens per radian."""
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * inverse)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    weight = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1 / (weight + (1 - weight) / scaling["factor"])


def _set_rope(config: Any, scaling: dict[str, Any], path: Path) -> None:
    """Set the scaling of a configuration's rotary angles."""
    rope = getattr(config, "rope_parameters", None)
    if rope is None:  # transformers 4
        config.rope_scaling = scaling
    elif rope.get("rope_type", "default") == "default" and "rope_theta" in rope:
        config.rope_parameters = {**rope, **scaling}
    else:
        _refuse(path, f"rotary angles scaled by {scaling['rope_type']} in a {config.model_type}")


def _refuse(path: Path, what: str) -> None:
    raise CheckpointError(
        f"{path.name} has {what}, which transformers doesn't compute from a GGUF file: {_ORIGIN}"
    )


@contextmanager
def headers_read_once() -> Iterator[None]:
    """Read each GGUF file's header, and its table of names, once in this block.

    transformers reads the header for the configuration, the tokenizer and the weights, and creates
    the table for each module: half a minute for SmolLM2-135M. Without gguf nothing is changed.
    """
    if find_spec("gguf") is None:
        yield
        return
    import gguf

    library: Any = gguf
    reader, names = library.GGUFReader, library.get_tensor_name_map
    if not isinstance(reader, type):  # within a block
        yield
        return

    class Header(reader):  # type: ignore[misc, valid-type]
        """Fields are plain arrays: slices of a memmap take several times as long."""

        def __setattr__(self, name: str, value: Any) -> None:
            is_file = name == "data"
            super().__setattr__(name, np.asarray(value) if is_file else value)

    @functools.cache
    def header(path: str) -> Header:
        return Header(path)

    try:
        library.GGUFReader = lambda path: header(str(path))
        library.get_tensor_name_map = functools.cache(names)
        yield
    finally:
        library.GGUFReader, library.get_tensor_name_map = reader, names

"""Configurations of Hugging Face models: a config.json as one that transformers can build."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flexq_bench.errors import UsageError
from flexq_bench.runs.text_files import read_text

CONFIG = "config.json"
_MAX_BYTES = 1 << 20
_MAX_COUNTS = (  # older transformers build experts one by one
    (1000, re.compile(r"(num|n)_.*layers?$|n_layers?$|num_layers$")),
    (20_000, re.compile(r"(num|n)_.*experts$")),
)
# Keys that make transformers import packages or code, or a data type, without effect on the sizes.
_NOT_SIZES = frozenset(
    {
        "quantization_config",
        "compression_config",
        "auto_map",
        "_attn_implementation",
        "attn_implementation",
        "dtype",
        "torch_dtype",
    }
)
# Other files that describe what a folder holds, and what to do instead.
_OTHER_FILES = {
    "adapter_config.json": "an adapter: name the folder of its base model",
    "model_index.json": "a diffusion pipeline: name a language model",
    "params.json": f"a model in its maker's own format: name one with a {CONFIG}",
}
_OTHER_KEYS = {
    "peft_type": _OTHER_FILES["adapter_config.json"],
    "_diffusers_version": _OTHER_FILES["model_index.json"],
    "_class_name": _OTHER_FILES["model_index.json"],
}
# The decoder's section in a configuration of a model with more parts.
_SECTIONS = ("text_config", "llm_config", "language_config", "llm", "language_model")
# LLaMA's keys, and the same sizes in configurations of models with their own code.
_LLAMA_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "intermediate_size": ("ffn_hidden_size", "ffn_dim", "n_inner", "mlp_hidden_size"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
}
_LLAMA_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "num_key_value_heads": (
        "num_kv_heads",
        "n_kv_heads",
        "multi_query_group_num",
        "num_attention_groups",
    ),
    "head_dim": ("kv_channels",),
}
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_GATED = re.compile(r"silu|swiglu|swish|geglu|reglu")
_GATED_TYPES = frozenset({"chatglm"})  # their configurations name no activation
# Keys of blocks that are not LLaMA's.
_OTHER_BLOCKS = re.compile(
    r"expert|moe|mamba|ssm|lora|conv|linear|recurr|block_config|layer_type|hybrid|sparse|pattern"
    r"|shared_head|per_layer|multiplier"
)
_OTHERWISE = "install one that does, or measure its sizes by --n and --k"
log = logging.getLogger(__name__)


def read_config(path: str) -> tuple[Path, dict[str, Any]]:
    """Read a config.json, or that of a folder; returns the file and its keys without _NOT_SIZES.

    model_type is one that transformers knows. Raises UsageError.
    """
    from transformers import CONFIG_MAPPING

    file = Path(path)
    if file.is_dir():
        _refuse_other_folder(file)
        file /= CONFIG
    text = read_text(str(file), f"a {CONFIG} or its folder", most_bytes=_MAX_BYTES)
    try:
        values = json.loads(text, object_hook=_decode_object)
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not JSON: name a {CONFIG} or its folder") from None
    if not isinstance(values, dict):
        raise UsageError(f"{file} has no model_type: name the {CONFIG} of a model")
    _refuse_other_file(file, values)
    _check_counts(values, file)
    for candidate in _candidates(values):
        kind = candidate.get("model_type")
        if kind == "mistral" and candidate.get("layer_types"):
            kind = "ministral"  # as in transformers' AutoConfig
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            kind = _type_of_class(candidate)
        if kind is not None and kind in CONFIG_MAPPING:
            return file, {**candidate, "model_type": kind}
    return file, _as_llama(values, file)


def _refuse_other_folder(folder: Path) -> None:
    """Raise UsageError for a folder without config.json whose contents are recognized."""
    if (folder / CONFIG).exists():
        return
    for name, content in _OTHER_FILES.items():
        if (folder / name).exists():
            raise UsageError(f"{folder} has no {CONFIG}, and its {name} is that of {content}")


def _refuse_other_file(file: Path, values: Mapping[str, Any]) -> None:
    for key, content in _OTHER_KEYS.items():
        if key in values and "model_type" not in values:
            raise UsageError(f"{file} has {key}: it is that of {content}")


def _decode_object(values: dict[str, Any]) -> Any:
    """Decode transformers' tag of a number that JSON lacks, and leave out _NOT_SIZES."""
    if list(values) == ["__float__"]:
        return float(values["__float__"])
    return {key: value for key, value in values.items() if key not in _NOT_SIZES}


def _check_counts(values: Mapping[str, Any], file: Path) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _check_counts(value, file)
        for most, pattern in _MAX_COUNTS:
            if isinstance(value, int) and value > most and pattern.fullmatch(key):
                raise UsageError(
                    f"{file} has {key} {value:,}, and {most:,} is the most that is built: mend it"
                )


def _candidates(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration, then the sections of its decoder."""
    yield values
    for name in _SECTIONS:
        section = values.get(name)
        if isinstance(section, dict):
            yield section


def _type_of_class(values: Mapping[str, Any]) -> str | None:
    """The model type of the class that `architectures` names; None: unknown to transformers."""
    import transformers

    from flexq_bench.schemes.model_files import class_name

    try:
        return str(getattr(transformers, class_name(values)).config_class.model_type)
    except (AttributeError, ImportError):  # unknown, or of a package that is not installed
        return None


def _as_llama(values: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The configuration of LLaMA with the sizes of one of unknown type. Raises UsageError."""
    import transformers

    *_, section = _candidates(values)
    kind = section.get("model_type", values.get("model_type"))
    if not isinstance(kind, str):
        raise UsageError(f"{file} has no model_type: name the {CONFIG} of a model")
    version = f"transformers {transformers.__version__}"
    unknown = f"{file} is of type {kind!r:.60}, which {version} does not know"
    sizes = {name: _size(section, name, others) for name, others in _LLAMA_KEYS.items()}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise UsageError(f"{unknown}, and has no {', '.join(missing)}: {_OTHERWISE}")
    other = next((key for key, v in section.items() if v and _OTHER_BLOCKS.search(key)), None)
    if other is not None:
        raise UsageError(f"{unknown}, and {other:.60} is not LLaMA's: {_OTHERWISE}")
    activation = next((str(section[key]) for key in _ACTIVATIONS if section.get(key)), "")
    if kind not in _GATED_TYPES and not _GATED.search(activation):
        raise UsageError(f"{unknown}, and names no gated hidden_act: {_OTHERWISE}")
    sizes |= {name: _size(section, name, others) for name, others in _LLAMA_OPTIONAL.items()}
    if section.get("multi_query_attention") is False:
        sizes["num_key_value_heads"] = None
    log.warning("%s: its sizes are read as those of LLaMA's blocks", unknown)
    return {"model_type": "llama", **{key: size for key, size in sizes.items() if size is not None}}


def _size(values: Mapping[str, Any], name: str, others: tuple[str, ...]) -> int | None:
    return next((values[key] for key in (name, *others) if values.get(key) is not None), None)

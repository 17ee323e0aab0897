"""Comparison of config.json and generation_config.json with the original's.

Both configurations are completed with the defaults of transformers' classes, which also convert the
spellings of earlier versions (`rope_scaling`, `torch_dtype`). Keys that cannot change results at
inference are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexq_bench.accuracy.artefacts.differences import (
    Difference,
    changed,
    differing_leaves,
    equal_values,
    shown,
)
from flexq_bench.checkpoints.folders import read_config
from flexq_bench.checkpoints.model_source import GgufSource
from flexq_bench.schemes.model_files import CONFIG, model_at, read_json

GENERATION = "generation_config.json"
GENERATION_ABSENT = "generation_config.absent"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_PAD = "pad_token_id"
# About the file, the storage of weights, training, and what a caller wants returned.
_UNDECIDING = re.compile(
    r"_.*|dtype|torch_dtype|quantization_config|transformers_version|use_cache|use_bfloat16"
    r"|initializer_.*|.*drop(out)?|.*_dropout_.*|pretraining_tp|gradient_checkpointing"
    r"|output_.*|return_dict.*|torchscript|tf_legacy_loss|unsloth_.*|transformers\.js_config"
    r"|type|problem_type|id2label|label2id|num_labels|router_aux_loss_coef|router_jitter_noise"
)
_OLDER_ROPE = ("rope_theta", "partial_rotary_factor")
_EMPTY: tuple[Any, ...] = (None, False, {}, [], "", 0)


@dataclass(frozen=True, slots=True)
class FolderSettings:
    """Settings of a folder or a GGUF file.

    config: completed with defaults; known: the keys that its class defines. generation: of
    generation_config.json, completed with defaults; has_generation: the folder has that file.
    is_gguf: its metadata have only some of the keys.
    """

    config: dict[str, Any]
    known: frozenset[str]
    generation: dict[str, Any]
    has_generation: bool
    is_gguf: bool = False

    @property
    def positions(self) -> int | None:
        """Number of positions; None: the configuration states none."""
        return self.config.get("max_position_embeddings")


def read_settings(path: Path) -> FolderSettings:
    """Read the settings of a folder or a GGUF file. Raises UsageError if it has none."""
    if not (path / CONFIG).is_file():
        config = GgufSource(model_at(path)).config().to_dict()
        completed, known = _completed(config)
        generation = _generation_defaults() | {key: completed.get(key) for key in _IDS}
        return FolderSettings(completed, known, generation, has_generation=False, is_gguf=True)
    read_json(path / CONFIG)  # raises UsageError if it can't be read
    config, _ = read_config(path)
    completed, known = _completed(config)
    file = path / GENERATION
    defaults = _generation_defaults()
    own = read_json(file) if file.is_file() else config  # as transformers: of older folders
    stated = {key: own[key] for key in defaults if own.get(key) is not None}
    ids = {key: completed.get(key) for key in _IDS}
    return FolderSettings(completed, known, defaults | ids | stated, file.is_file())


def config_differences(ours: FolderSettings, theirs: FolderSettings) -> Iterator[Difference]:
    """The differences in config.json."""
    generation = _generation_defaults().keys() - set(_IDS)
    is_gguf = ours.is_gguf or theirs.is_gguf
    known = ours.known | theirs.known
    for key in sorted(ours.config.keys() | theirs.config.keys()):
        own, other = ours.config.get(key), theirs.config.get(key)
        if _UNDECIDING.fullmatch(key) or (key in generation and key not in known):
            continue
        if key in _IDS:
            if not _same_ids(key, own, other):
                yield changed(f"config.{key}", own, other)
        elif key == "architectures":
            if own and other and [str(n).lower() for n in own] != [str(n).lower() for n in other]:
                yield changed(f"config.{key}", own, other)
        elif key == "tie_word_embeddings":
            # A head of its own is compared as a tensor.
            if own and not other:
                yield changed(f"config.{key}", own, other)
        elif key not in known and (is_gguf or (own in _EMPTY and other in _EMPTY)):
            continue
        elif key == "auto_map" and not own:
            continue  # code of the folder is never run here
        else:
            for difference in differing_leaves(f"config.{key}", own, other):
                if not _UNDECIDING.fullmatch(difference.name.rpartition(".")[2]):
                    yield difference


def generation_differences(ours: FolderSettings, theirs: FolderSettings) -> Iterator[Difference]:
    """The differences in the settings of generation.

    Without a file, only its token ids are compared one by one: those of config.json apply.
    """
    lost = []
    for key in sorted(ours.generation.keys() | theirs.generation.keys()):
        own, other = ours.generation.get(key), theirs.generation.get(key)
        if _UNDECIDING.fullmatch(key):
            continue
        if key in _IDS:
            # Without a file on either side they are those of config.json.
            has_file = ours.has_generation or theirs.has_generation
            if has_file and not _same_ids(key, own, other):
                yield changed(f"generation_config.{key}", own, other)
        elif not equal_values(own, other):
            if ours.has_generation or not theirs.has_generation:
                yield changed(f"generation_config.{key}", own, other)
            else:
                lost.append(f"{key} {shown(other)}")
    if lost:
        detail = f"no {GENERATION}, the original's has {', '.join(lost)}"
        yield Difference(GENERATION_ABSENT, detail)


def _same_ids(key: str, ours: Any, theirs: Any) -> bool:
    """Return True for equal sets of ids. Padding that the original lacks changes nothing."""
    if key == _PAD and _as_ids(theirs) == set():
        return True
    return _as_ids(ours) == _as_ids(theirs)


def _as_ids(value: Any) -> set[Any]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if v is not None and v != -1}  # -1: none, in some early folders


def _completed(config: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Complete a configuration by its class; returns it, and the keys that the class defines."""
    from transformers import AutoConfig

    values = dict(config)
    try:
        kind = values.pop("model_type")
        completed = AutoConfig.for_model(kind, **values).to_dict()
        known = AutoConfig.for_model(kind).to_dict().keys()
    except Exception:  # of any class: an unknown type, or a value that the class refuses
        return dict(config), frozenset()
    rope = completed.get("rope_parameters")
    if isinstance(rope, dict):  # other engines prefer the older keys, which this class passes over
        older = {key: config[key] for key in _OLDER_ROPE if config.get(key) is not None}
        completed |= {key: v for key, v in older.items() if key in rope and rope[key] != v}
    return completed, frozenset(known)


def _generation_defaults() -> dict[str, Any]:
    """The settings of generation with the values that apply where a folder states none."""
    from transformers import GenerationConfig

    config = GenerationConfig()
    defaults: dict[str, Any] = config.to_dict()
    own_defaults = getattr(config, "_get_default_generation_params", dict)  # since 5.0
    defaults |= own_defaults()
    return {key: value for key, value in defaults.items() if not _UNDECIDING.fullmatch(key)}

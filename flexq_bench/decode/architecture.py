"""What a decoder is beside its dimensions, from the catalog or from a model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexq_bench.errors import UsageError
from workloads.errors import WorkloadError
from workloads.models import Block, ModelSpec

_ARCHITECTURES: dict[str, Block] = {"LlamaForCausalLM": "llama", "OPTForCausalLM": "opt"}
OPT_POSITION_OFFSET = 2  # the table's first rows are for padding (transformers, modeling_opt.py)


@dataclass(frozen=True, slots=True)
class Architecture:
    """dimensions: of the catalog's form. head_dim: LLaMA's may differ from hidden / heads.

    eps: of the norms. rope_theta: base of the rotary angles. rope_scaling: the keys of
    transformers' "llama3" scaling; empty: none.
    """

    dimensions: ModelSpec
    head_dim: int
    eps: float
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float], ...] = ()

    @property
    def block(self) -> Block:
        return self.dimensions.block

    def rotary(self, length: int, device: torch.device) -> torch.Tensor | None:
        """FP32 [length, head_dim / 2, 2], cosines and sines; None: positions are learned."""
        if self.dimensions.learned_positions:
            return None
        half = self.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32) * 2 / self.head_dim
        frequencies = _scaled(1.0 / self.rope_theta**exponents, dict(self.rope_scaling))
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
        return torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)


def of_catalog(model: ModelSpec) -> Architecture:
    """A model of the catalog. Its eps and angles don't matter to speed: those of LLaMA."""
    return Architecture(model, model.head_dim, 1e-5)


def of_folder(folder: Path) -> Architecture:
    """A Hugging Face folder's. Raises UsageError if it has none, or one that we don't have."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no config.json: give a folder as save_pretrained writes it"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read {path}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object: copy it again")
    return of_config(config, folder.name)


def of_config(config: Mapping[str, Any], name: str) -> Architecture:
    """Of the contents of a config.json. Raises UsageError."""
    given = (config.get("architectures") or ["none"])[0]
    if given not in _ARCHITECTURES:
        raise UsageError(
            f"{name} is a {given}, and decode has {' and '.join(_ARCHITECTURES)}: pick another"
        )
    try:
        return _llama(config, name) if _ARCHITECTURES[given] == "llama" else _opt(config, name)
    except KeyError as error:
        raise UsageError(f"config.json of {name} has no {error}: copy it again") from error
    except WorkloadError as error:
        raise UsageError(str(error)) from error


def _llama(config: Mapping[str, Any], name: str) -> Architecture:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(f"{name} has {config['hidden_act']} where decode has silu")
    dimensions = ModelSpec(
        name=name,
        family=name,
        block="llama",
        hidden=hidden,
        ffn=int(config["intermediate_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        vocab=int(config["vocab_size"]),
        context=int(config["max_position_embeddings"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        learned_positions=False,
        source="config.json",
    )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"{name} scales its rotary angles by {kind!r}: decode has default, llama3")
    scaling = tuple(
        (key, float(rope[key]))
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
        if kind == "llama3"
    )
    return Architecture(
        dimensions,
        int(config.get("head_dim") or hidden // heads),
        float(config.get("rms_norm_eps", 1e-6)),
        float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        scaling,
    )


def _opt(config: Mapping[str, Any], name: str) -> Architecture:
    hidden = int(config["hidden_size"])
    if not config.get("do_layer_norm_before", True) or config.get(
        "word_embed_proj_dim", hidden
    ) not in (None, hidden):
        raise UsageError(
            f"{name} norms after its layers or projects its embeddings, as OPT-350M: "
            "pick another size"
        )
    if config.get("activation_function", "relu") != "relu":
        raise UsageError(f"{name} has {config['activation_function']} where decode has relu")
    dimensions = ModelSpec(
        name=name,
        family=name,
        block="opt",
        hidden=hidden,
        ffn=int(config["ffn_dim"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        kv_heads=int(config["num_attention_heads"]),
        vocab=int(config["vocab_size"]),
        context=int(config["max_position_embeddings"]),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        learned_positions=True,
        source="config.json",
    )
    return Architecture(dimensions, dimensions.head_dim, 1e-5)


def _scaled(frequencies: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Llama 3's angles: long waves are stretched, short ones kept, those between blended."""
    if not scaling:
        return frequencies
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * torch.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling["factor"])

"""Random weights of a catalog model as a source for quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from flexq_bench.checkpoints.model_source import ModelSource, Named, check_tensors
from flexq_bench.decode.model_weights import (
    HEAD_NORMS,
    LLAMA_NORMS,
    OPT_NORMS,
    path_in_block,
)
from flexq_bench.decode.weights import Affine, SyntheticWeights, layer_shape, parts_of
from flexq_bench.errors import UsageError
from flexq_bench.schemes.linear_layers import Origin

_IN_A_BLOCK = re.compile(r"layers\.(\d+)\.(.+)$")


class SyntheticSource(ModelSource):
    """The same random weights as in decode, generated on demand."""

    is_synthetic = True

    def __init__(self, weights: SyntheticWeights) -> None:
        if weights.architecture.dimensions.experts is not None:
            raise UsageError(
                "random weights of experts are not quantized to a checkpoint: decode them"
            )
        self.name = weights.architecture.dimensions.name
        self._weights = weights
        self._is_opt = weights.architecture.block == "opt"

    def config(self) -> Any:
        from transformers import AutoConfig, OPTConfig

        architecture, model = self._weights.architecture, self._weights.architecture.dimensions
        common: dict[str, Any] = {
            "hidden_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "vocab_size": model.vocab,
            "max_position_embeddings": model.context,
            "tie_word_embeddings": model.tied_embeddings,
        }
        if self._is_opt:
            return OPTConfig(
                **common,
                ffn_dim=model.ffn,
                word_embed_proj_dim=model.hidden,
                architectures=["OPTForCausalLM"],
            )
        if model.block == "mistral":
            common["sliding_window"] = None
        return AutoConfig.for_model(
            model.block,
            **common,
            intermediate_size=model.ffn,
            num_key_value_heads=model.kv_heads,
            head_dim=architecture.head_dim,
            rms_norm_eps=architecture.eps,
            architectures=[architecture.class_name],
        )

    def bind(self, model: Any, origins: Mapping[str, Origin]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        check_tensors(self.name, model, shapes)

    def companions(self, scratch: Path) -> list[Path]:
        return []

    def read(self, names: Iterable[str], device: torch.device) -> Iterator[Named]:
        loaded: tuple[str, dict[str, torch.Tensor]] = ("", {})
        for name in names:
            within = _IN_A_BLOCK.search(name)
            part = within[1] if within else "ends"
            if part != loaded[0]:
                loaded = ("", {})  # one part at a time
                drawn = self._block(int(part), device) if within else self._ends(device)
                loaded = (part, drawn)
            yield name, loaded[1][within[2] if within else name.rpartition("model.")[2]]

    def _block(self, index: int, device: torch.device) -> dict[str, torch.Tensor]:
        """A block's tensors by their names within the block."""
        block = self._weights.block(index, device)
        tensors: dict[str, torch.Tensor] = {}
        for fused, layer in block.linears.items():
            kinds = parts_of(fused)
            rows = [layer_shape(self._weights.architecture, kind)[0] for kind in kinds]
            weights = torch.split(layer.weight.values, rows)
            biases = [None] * len(rows) if layer.bias is None else torch.split(layer.bias, rows)
            for kind, weight, bias in zip(kinds, weights, biases, strict=True):
                tensors |= _named(path_in_block(kind), Affine(weight, bias))
        norms = OPT_NORMS if self._is_opt else LLAMA_NORMS
        for name, norm in zip(norms, (block.attention_norm, block.ffn_norm), strict=True):
            tensors |= _named(name, norm)
        for name, weight in zip(HEAD_NORMS, block.head_norms or (), strict=False):
            tensors[f"{name}.weight"] = weight
        return tensors

    def _ends(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Tensors outside the blocks, by their names after `model.`."""
        ends = self._weights.ends(device)
        root = "decoder." if self._is_opt else ""
        norm = _named(f"{root}final_layer_norm" if self._is_opt else "norm", ends.norm)
        tensors = {
            f"{root}embed_tokens.weight": ends.embedding,
            "lm_head.weight": ends.head,
            **norm,
        }
        if ends.positions is not None:
            tensors[f"{root}embed_positions.weight"] = ends.positions
        return tensors


def _named(name: str, part: Affine) -> dict[str, torch.Tensor]:
    biases = {} if part.bias is None else {f"{name}.bias": part.bias}
    return {f"{name}.weight": part.weight, **biases}

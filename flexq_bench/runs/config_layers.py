"""The linear layers of a Hugging Face configuration, as a serving engine runs them.

transformers builds the model on torch's meta device: without weights, network access or custom
code of the model. Names and sizes are read from its linear modules.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.errors import UsageError, one_line
from flexq_bench.runs.text_files import read_text
from workloads.model_spec import LayerShape
from workloads.names import unknown

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_MOST_BLOCKS = 1000  # also of experts per block: older transformers build them one by one
_COUNTS = re.compile(r"(num|n)_.*(layers|layer|experts)$|n_layers?$|num_layers$")
_EXPERTS = re.compile(r"(shared_)?experts?")
_ROUTERS = ("gate", "router", "shared_expert_gate")
# Keys that make transformers import packages or code on which the sizes don't depend.
_NOT_SIZES = ("quantization_config", "compression_config", "auto_map", "_attn_implementation")
# Projections of one input that serving engines stack along N, in their order.
_STACKED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)


def layers_of_config(path: str) -> tuple[LayerShape, ...]:
    """The distinct linear layers of the blocks of a config.json, or of a folder with one.

    Experts are one layer with a count. The output head and routers are excluded: no scheme
    quantizes them. Raises UsageError if the file can't be read, is no model configuration, or its
    model type is unknown to the installed transformers.
    """
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    values = _read_config(str(file))
    model, hidden = _build_model(values, str(file))
    counts: Counter[LayerShape] = Counter()
    for layers in _layers_by_parent(model, hidden).values():
        for shape in _stacked(layers):
            counts[replace(shape, count=1)] += shape.count
    if not counts:
        raise UsageError(f"{file} makes a model without linear layers: name that of a decoder")
    return tuple(replace(shape, count=count) for shape, count in counts.items())


def chosen_layers(layers: Sequence[LayerShape], names: Sequence[str]) -> tuple[LayerShape, ...]:
    """The layers with these names; `fused` selects all. Raises UsageError for an unknown name."""
    if tuple(names) == ("fused",):
        return tuple(layers)
    for name in names:
        if name not in {layer.name for layer in layers}:
            raise UsageError(unknown("layer of --config named", name, [s.name for s in layers]))
    return tuple(layer for layer in layers if layer.name in names)


def _read_config(file: str) -> dict[str, Any]:
    text = read_text(file, f"a {CONFIG} or its folder", most_bytes=_MOST_BYTES)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{file} is not JSON: name a {CONFIG} or its folder") from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UsageError(f"{file} has no model_type: name the {CONFIG} of a model")
    _check_counts(values, file)
    return values


def _check_counts(values: Mapping[str, Any], file: str) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _check_counts(value, file)
        elif isinstance(value, int) and _COUNTS.fullmatch(key) and value > _MOST_BLOCKS:
            most = f"{_MOST_BLOCKS:,} is the most that is built"
            raise UsageError(f"{file} has {key} {value:,}, and {most}: mend it")


def _build_model(values: Mapping[str, Any], file: str) -> tuple[torch.nn.Module, int]:
    """Build the decoder on the meta device; returns it and its hidden size. Raises UsageError."""
    import torch
    import transformers
    from transformers.utils import logging

    kind = values["model_type"]
    version = f"transformers {transformers.__version__}"
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(
            f"{file} is of type {kind!r:.60}, which {version} does not know: install one that does"
        )
    sizes = {key: value for key, value in values.items() if key not in _NOT_SIZES}
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # hides advice on packages for running the model
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(sizes).get_text_config(decoder=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
        return model, int(config.hidden_size)
    except Exception as error:  # model code raises any exception for impossible sizes
        raise UsageError(
            f"{version} builds no decoder of {file} ({one_line(error):.120}): mend it, or "
            "name another"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _layers_by_parent(model: torch.nn.Module, hidden: int) -> dict[str, dict[str, LayerShape]]:
    """Layers by name, by the path of their parent module, in the order of the model."""
    import torch
    from transformers.pytorch_utils import Conv1D

    parents: dict[str, dict[str, LayerShape]] = {}
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if not any(part.isdigit() for part in path.split(".")):
            continue  # outside the blocks: the output head, a projection of the embeddings
        if isinstance(module, torch.nn.Linear) and name not in _ROUTERS:
            shape = LayerShape(name, module.out_features, module.in_features)
            parents.setdefault(parent, {})[name] = shape
        elif isinstance(module, Conv1D):
            k, n = module.weight.shape
            parents.setdefault(parent, {})[name] = LayerShape(name, n, k)
        elif name == "experts":
            stacked = {shape.name: shape for shape in _experts(module, hidden)}
            parents.setdefault(path, {}).update(stacked)
    return {parent: _prefixed(parent, layers) for parent, layers in parents.items()}


def _experts(module: torch.nn.Module, hidden: int) -> Iterator[LayerShape]:
    """Yield the layers of experts stored as one tensor [experts, N, K] or [experts, K, N]."""
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim == 3:
            count, n, k = weight.shape
            is_down = "down" in name or name == "w2"
            if (n if is_down else k) != hidden:
                n, k = k, n
            yield LayerShape(name, n, k, count)


def _prefixed(parent: str, layers: Mapping[str, LayerShape]) -> dict[str, LayerShape]:
    """Prefix the names of layers of experts: `experts.down_proj`."""
    experts = [part for part in parent.split(".") if _EXPERTS.fullmatch(part)]
    prefix = f"{experts[-1]}." if experts else ""
    return {name: replace(shape, name=prefix + name) for name, shape in layers.items()}


def _stacked(layers: Mapping[str, LayerShape]) -> Iterator[LayerShape]:
    """Yield the layers of one module, with projections of the same input stacked."""
    remaining = dict(layers)
    for name in layers:
        if name not in remaining:
            continue
        for fused, parts in _STACKED:
            found = [remaining[part] for part in parts if part in remaining]
            if name in parts and len(found) == len(parts) and len({s.k for s in found}) == 1:
                prefix = found[0].name.removesuffix(parts[0])
                n = sum(s.n for s in found)
                yield replace(found[0], name=prefix + fused, n=n, fused=True)
                for part in parts:
                    del remaining[part]
                break
        else:
            yield remaining.pop(name)

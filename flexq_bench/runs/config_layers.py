"""The linear layers of a Hugging Face configuration, as a serving engine runs them.

The model is built by transformers on torch's meta device: no weights, no network, no code of the
model's own. Its linear layers then tell their names and sizes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexq_bench.errors import UsageError
from flexq_bench.runs.text_files import read_text
from workloads.model_spec import LayerShape
from workloads.names import unknown

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
_MOST_BYTES = 1 << 20
_MOST_BLOCKS = 1000  # and experts of a block, which an older transformers builds one by one
_COUNTS = re.compile(r"(num|n)_.*(layers|layer|experts)$|n_layers?$|num_layers$")
_EXPERTS = re.compile(r"(shared_)?experts?")
_ROUTERS = ("gate", "router", "shared_expert_gate")
# Keys that would have transformers look for packages or code that the sizes don't depend on.
_NOT_SIZES = ("quantization_config", "compression_config", "auto_map", "_attn_implementation")
# Projections of one input that engines stack along N, in their order.
_STACKED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
)


def layers_of_config(path: str) -> tuple[LayerShape, ...]:
    """The linear layers of the blocks of a config.json, or of a folder with one, each shape once.

    Experts are one layer with their count. The output head and routers are left out: no scheme
    quantizes them. Raises UsageError if the file can't be read, is none, or is of a model that the
    installed transformers does not know.
    """
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    values = _values(str(file))
    model, hidden = _built(values, str(file))
    counts: Counter[LayerShape] = Counter()
    for layers in _by_parent(model, hidden).values():
        for shape in _stacked(layers):
            counts[replace(shape, count=1)] += shape.count
    if not counts:
        raise UsageError(f"{file} makes a model without linear layers: name that of a decoder")
    return tuple(replace(shape, count=count) for shape, count in counts.items())


def chosen_layers(layers: Sequence[LayerShape], names: Sequence[str]) -> tuple[LayerShape, ...]:
    """The layers that have these names; `fused` stands for all. Raises UsageError."""
    if tuple(names) == ("fused",):
        return tuple(layers)
    for name in names:
        if name not in {layer.name for layer in layers}:
            raise UsageError(unknown("layer of --config named", name, [s.name for s in layers]))
    return tuple(layer for layer in layers if layer.name in names)


def _values(file: str) -> dict[str, Any]:
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


def _built(values: Mapping[str, Any], file: str) -> tuple[torch.nn.Module, int]:
    """The decoder on the meta device, and its hidden size. Raises UsageError."""
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
    logging.set_verbosity(logging.CRITICAL)  # advice on what a model would need to run
    try:
        whole = transformers.CONFIG_MAPPING[kind].from_dict(sizes)
        config = whole.get_text_config(decoder=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=False
            )
        return model, int(config.hidden_size)
    except Exception as error:  # whatever a model's own code makes of sizes that can't be
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{version} builds no decoder of {file} ({reason:.120}): mend it, or name another"
        ) from error
    finally:
        logging.set_verbosity(verbosity)


def _by_parent(model: torch.nn.Module, hidden: int) -> dict[str, dict[str, LayerShape]]:
    """Layers by name, of each module that holds some, in the order of the model."""
    import torch
    from transformers.pytorch_utils import Conv1D

    parents: dict[str, dict[str, LayerShape]] = {}
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        if not any(part.isdigit() for part in path.split(".")):
            continue  # of no block: the output head, a projection of the embeddings
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
    """Experts whose weights are one tensor [experts, N, K], or [experts, K, N]."""
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim == 3:
            count, n, k = weight.shape
            is_down = "down" in name or name == "w2"
            if (n if is_down else k) != hidden:
                n, k = k, n
            yield LayerShape(name, n, k, count)


def _prefixed(parent: str, layers: Mapping[str, LayerShape]) -> dict[str, LayerShape]:
    """Layers of experts by names of their own: `experts.down_proj`."""
    experts = [part for part in parent.split(".") if _EXPERTS.fullmatch(part)]
    prefix = f"{experts[-1]}." if experts else ""
    return {name: replace(shape, name=prefix + name) for name, shape in layers.items()}


def _stacked(layers: Mapping[str, LayerShape]) -> Iterator[LayerShape]:
    """The layers of one module, those of one input stacked."""
    left = dict(layers)
    for name in layers:
        if name not in left:
            continue
        for fused, parts in _STACKED:
            own = [left[part] for part in parts if part in left]
            if name in parts and len(own) == len(parts) and len({s.k for s in own}) == 1:
                prefix = own[0].name.removesuffix(parts[0])
                n = sum(s.n for s in own)
                yield replace(own[0], name=prefix + fused, n=n, fused=True)
                for part in parts:
                    del left[part]
                break
        else:
            yield left.pop(name)

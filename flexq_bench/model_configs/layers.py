"""The linear layers of a Hugging Face configuration, as a serving engine runs them.

transformers builds the model on torch's meta device: without weights, network access or custom
code of the model. Names and sizes are read from its linear modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flexq_bench.errors import UsageError
from flexq_bench.model_configs.files import read_config
from flexq_bench.model_configs.models import build_model
from flexq_bench.workloads.model_spec import LayerShape
from flexq_bench.workloads.names import unknown

if TYPE_CHECKING:
    import torch

_EXPERTS = re.compile(r"(shared_)?experts?")
_WRAPPED = frozenset({"linear", "layer"})  # the module around it has the name
_CROSS = re.compile(r"cross_?att|encoder_(decoder_)?att|EncDecAtt", re.IGNORECASE)
_MAX_UNREAD_SHARE = 0.1  # of the weights in blocks
# Projections of one input that serving engines stack along N, in their order.
_QKV = tuple(
    tuple(pattern.format(letter) for letter in letters)
    for pattern, letters in (
        ("{}_proj", "qkv"),
        ("{}", "qkv"),
        ("{}_lin", "qkv"),
        ("W{}", "qkv"),
        ("project_{}", "qkv"),
        ("{}", ("query", "key", "value")),
        ("{}_proj", ("query", "key", "value")),
    )
)
_STACKED: tuple[tuple[str, tuple[str, ...]], ...] = (
    *(("qkv_proj", names) for names in _QKV),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("gate_up_proj", ("w1", "w3")),
    ("gate_up_proj", ("w1", "v1")),
    ("gate_up_proj", ("wi_0", "wi_1")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
)
# In cross-attention, keys and values have another input than queries.
_STACKED_CROSS = tuple(("kv_proj", names[1:]) for names in _QKV)


def layers_of_config(path: str) -> tuple[LayerShape, ...]:
    """The distinct linear layers of the blocks of a config.json, or of a folder with one.

    Of a multimodal model: those of its text decoder. Experts are one layer with a count.
    The output head and routers are excluded: no scheme quantizes them. Raises UsageError if the
    file can't be read or is that of no language model, if the installed transformers can't build
    it, or if a tenth of the weights of its blocks has an unknown layout.
    """
    file, values = read_config(path)
    model, hidden = build_model(values, file)
    weights = _weights(model, hidden)
    counts: Counter[LayerShape] = Counter()
    for parent, layers in weights.layers.items():
        stacks = _STACKED_CROSS if _CROSS.search(parent) else _STACKED
        for shape in _stacked(layers, stacks):
            counts[replace(shape, count=1)] += shape.count
    if not counts:
        raise UsageError(f"{file} makes a model without linear layers: name that of a decoder")
    read = sum(shape.n * shape.k * count for shape, count in counts.items())
    total = read + sum(weights.unread.values())
    if total - read > _MAX_UNREAD_SHARE * total:
        raise UsageError(
            f"{file}: {1 - read / total:.0%} of the weights of its blocks have an unknown layout "
            f"({next(iter(weights.unread)):.60}): measure its sizes by --n and --k"
        )
    return tuple(replace(shape, count=count) for shape, count in counts.items())


def chosen_layers(layers: Sequence[LayerShape], names: Sequence[str]) -> tuple[LayerShape, ...]:
    """The layers with these names; `fused` selects all. Raises UsageError for an unknown name."""
    if tuple(names) == ("fused",):
        return tuple(layers)
    for name in names:
        if name not in {layer.name for layer in layers}:
            raise UsageError(unknown("layer of --config named", name, [s.name for s in layers]))
    return tuple(layer for layer in layers if layer.name in names)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of a model's blocks. layers: by name, by the path of their parent module.

    unread: numbers of elements of tensors with an unknown layout, by path.
    """

    layers: dict[str, dict[str, LayerShape]] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)

    def add(self, path: str, shape: LayerShape, group: str = "") -> None:
        """Add a layer, named after its module and a group of experts: `experts.down_proj`."""
        parent, name = _split(path)
        groups = [part for part in path.split(".")[:-1] if _EXPERTS.fullmatch(part)]
        prefix = groups[-1] if groups else group
        full = f"{prefix}.{name}" if prefix else name
        self.layers.setdefault(parent, {})[name] = replace(shape, name=full)

    def leave(self, tensors: Mapping[str, torch.Tensor], path: str) -> None:
        """Count tensors of a module as unread."""
        for name, weight in tensors.items():
            self.unread[f"{path}.{name} {list(weight.shape)}"] += weight.numel()


def _weights(model: torch.nn.Module, hidden: int) -> _Weights:
    """Collect the weights of the text blocks of a model, in the order of its modules."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from flexq_bench.schemes.model_map import MIN_SIDE, is_router, mixtures, text_modules

    weights = _Weights()
    mixed = mixtures(model)
    seen: set[int] = set()
    for path, module in text_modules(model):
        own = {
            name: weight
            for name, weight in module.named_parameters(recurse=False)
            if weight.ndim > 1 and id(weight) not in seen
        }
        seen |= {id(weight) for weight in own.values()}  # blocks that are used again are tied
        if not own or not _is_in_block(path) or is_router(path, mixed):
            continue
        if isinstance(module, torch.nn.Linear):
            groups = getattr(module, "n_groups", 1)
            n, k = module.out_features // groups, module.in_features
            if min(n, k) >= MIN_SIDE:
                weights.add(path, LayerShape("", n, k, groups))
        elif isinstance(module, Conv1D):
            k, n = module.weight.shape
            weights.add(path, LayerShape("", n, k))
        elif _holds_experts(path, module):
            packed = _packed(own, module, hidden)
            for name, shape in packed.items():
                own_path = path if name == "weight" else f"{path}.{name}"
                weights.add(own_path, shape, "experts")
            weights.leave(
                {n: w for n, w in own.items() if n not in packed and "bias" not in n}, path
            )
        elif not isinstance(module, torch.nn.Embedding | torch.nn.Conv1d | torch.nn.Conv2d):
            weights.leave(own, path)
    return weights


def _is_in_block(path: str) -> bool:
    """True below an element of a list of modules: not the output head, not a list of matrices."""
    return any(part.isdigit() for part in path.split(".")[:-1])


def _is_parallel(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("ParallelExperts")


def _holds_experts(path: str, module: torch.nn.Module) -> bool:
    return _is_parallel(module) or any(_EXPERTS.fullmatch(part) for part in path.split("."))


def _split(path: str) -> tuple[str, str]:
    """The path of the parent module and the name of a layer: `a.ffn.0` is `ffn.0` of `a.ffn`."""
    parts = path.split(".")
    name = parts.pop()
    if name in _WRAPPED and not parts[-1].isdigit():
        name = parts.pop()
    if name.isdigit():
        named = next(part for part in reversed(parts) if not part.isdigit())
        name = f"{named}.{name}"
    return ".".join(parts), name


def _packed(
    tensors: Mapping[str, torch.Tensor], module: torch.nn.Module, hidden: int
) -> dict[str, LayerShape]:
    """Layers of experts stored as one tensor: [experts, N, K], [experts, K, N], or two of DBRX's.

    DBRX has [experts * N, K], and [experts * K, N] of the last layer. Other tensors are left out.
    """
    shapes = {}
    stacked = getattr(module, "moe_num_experts", 0)  # along the rows
    for name, weight in tensors.items():
        if weight.ndim != (2 if stacked else 3):
            continue
        count, n, k = (
            weight.reshape(stacked, -1, weight.shape[-1]).shape if stacked else weight.shape
        )
        is_down = "down" in name or name == "w2"
        other_way = (n if is_down else k) != hidden and not _is_parallel(module)
        if getattr(module, "is_transposed", other_way):
            n, k = k, n
        shapes[name] = LayerShape(name, n, k, count)
    # Experts that compute nothing have a part of a tensor only.
    fewest = min((shape.count for shape in shapes.values()), default=0)
    return {name: replace(shape, count=fewest) for name, shape in shapes.items()}


def _stacked(
    layers: Mapping[str, LayerShape], stacks: Sequence[tuple[str, tuple[str, ...]]]
) -> Iterator[LayerShape]:
    """Yield the layers of one module, with projections of the same input stacked."""
    remaining = dict(layers)
    for name in layers:
        if name not in remaining:
            continue
        for fused, parts in stacks:
            shapes = [remaining[part] for part in parts if part in remaining]
            if name in parts and len(shapes) == len(parts) and len({s.k for s in shapes}) == 1:
                prefix = shapes[0].name.removesuffix(parts[0])
                n = sum(s.n for s in shapes)
                yield replace(shapes[0], name=prefix + fused, n=n, fused=True)
                for part in parts:
                    del remaining[part]
                break
        else:
            yield remaining.pop(name)

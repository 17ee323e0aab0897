"""Inputs of a decoder's linear layers, traced on the meta device: who reads what, made by whom.

A forward pass of a few tokens without weights shows which layers read the same tensor. It also
follows the output channels of each norm and each linear layer through the operations that keep
them: changes of layout, products with other tensors, ReLU, attention's weighted sums. If every
reader of a module's channels is a linear layer, a scale of these channels can be divided out of the
module and multiplied into its readers. An operation that is not known to keep channels ends this,
so an unknown architecture is never scaled wrongly; it only has fewer scalable inputs.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

log = logging.getLogger(__name__)
_TOKENS = 2
_META = torch.device("meta")
_AS_IS = frozenset({"relu", "_to_copy", "detach", "alias", "clone", "lift_fresh", "contiguous"})
_LAYOUT = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze"),
        *("squeeze", "slice", "select", "split", "split_with_sizes", "cat", "repeat", "unbind"),
        *("stack", "_reshape_alias", "narrow"),
    }
)
_Channels = dict[str, torch.Tensor]  # by source: each element's channel, int [...]; -1: another's


@dataclass(frozen=True, slots=True)
class SiteInput:
    """The input of one or more sites: output channels of a module of the block ("": its own input).

    A scale on these channels may be divided out of `source` and multiplied into `kinds`
    (SmoothQuant, AWQ, OmniQuant, ABQ-LLM, DGQ).

    source: its name within the block. kinds: the sites that read it. through: "norm": its weight is
    one factor per channel; "linear": rows of its weight are channels; None: a scale can't be folded
    (an activation function in between, a norm without weights, other readers), and the entry only
    states that the kinds have the same input. shared_heads: how many times the kinds read each
    channel of `source`, once per query head of a key-value head (v_proj -> o_proj with
    grouped-query attention); usually 1. head_dim: channels of such a head. norm_offset: constant
    that a norm adds to its weight.
    """

    source: str
    kinds: tuple[str, ...]
    through: Literal["norm", "linear"] | None
    shared_heads: int = 1
    head_dim: int = 1
    norm_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class TracedInput:
    """A SiteInput whose `source` and readers are names within the model.

    is_product: the tensor is the product of two others, as behind a gate.
    """

    source: str
    readers: tuple[str, ...]
    through: Literal["norm", "linear"] | None
    shared_heads: int = 1
    head_dim: int = 1
    norm_offset: float = 0.0
    is_product: bool = False


@dataclass(slots=True)
class _Record:
    """Observations of a forward pass.

    inputs: of each layer, by name, the tensors that it read, as keys, in the order of the layers.
    sources: of each tensor, the modules whose channels it has. readers: of each source, the layers
    and the channels [K] that they read. calls: of each module. ended: sources whose channels were
    used otherwise. block_inputs: the block that a tensor enters. products: tensors that are
    products of two others. is_whole: the pass ended.
    """

    inputs: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    sources: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    readers: dict[str, list[tuple[str, torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    ended: set[str] = field(default_factory=set)
    block_inputs: dict[Any, str] = field(default_factory=dict)
    products: set[Any] = field(default_factory=set)
    is_whole: bool = False


def trace_inputs(
    model: nn.Module, blocks: Sequence[str], layers: Iterable[str]
) -> tuple[tuple[TracedInput, ...], tuple[str, ...]]:
    """Trace the inputs of these linear layers; returns them and the layers in forward-pass order.

    blocks: names of the model's blocks. Layers that did not run are the only reader of their input.
    """
    names = tuple(layers)
    norms = {
        name: offset
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and any(name.startswith(f"{block}.") for block in blocks)
        and (offset := _norm_offset(module)) is not None
    }
    record = _run(model, blocks, names, norms)
    block_of = {n: next(b for b in blocks if n.startswith(f"{b}.")) for n in (*names, *norms)}
    groups: dict[Any, list[str]] = {}
    order = tuple(sorted(names, key=_positions(record.inputs, names)))
    for name in order:
        keys = record.inputs.get(name, [])
        key = (block_of[name], keys[0]) if len(keys) == 1 else name
        groups.setdefault(key, []).append(name)
    inputs = (_traced(key, tuple(own), record, norms, block_of) for key, own in groups.items())
    return tuple(inputs), order


def _positions(ran: Mapping[str, Any], names: Sequence[str]) -> Callable[[str], int]:
    """Position of a layer in the forward pass; one that didn't run comes after its predecessor."""
    order = {name: index for index, name in enumerate(ran)}
    positions, latest = {}, -1
    for name in names:
        latest = positions[name] = order.get(name, latest)
    return positions.__getitem__


def _traced(
    key: Any,
    readers: tuple[str, ...],
    record: _Record,
    norms: Mapping[str, float],
    block_of: Mapping[str, str],
) -> TracedInput:
    tensor = key[1] if isinstance(key, tuple) else None
    sources = record.sources.get(tensor, ())
    product = tensor in record.products
    for source in reversed(sources):
        read = record.readers[source]
        is_foldable = (
            record.is_whole
            and source not in record.ended
            and record.calls[source] == 1
            and {name for name, _ in read} == set(readers)
            and all(block_of[name] == block_of[source] for name in readers)
            and all(torch.equal(channels, read[0][1]) for _, channels in read)
        )
        heads = _shared_heads(read[0][1]) if is_foldable else None
        if heads is None:
            continue
        if source not in norms:
            return TracedInput(source, readers, "linear", *heads, is_product=product)
        if heads == (1, 1):
            return TracedInput(source, readers, "norm", norm_offset=norms[source])
    if tensor in record.block_inputs:
        return TracedInput(record.block_inputs[tensor], readers, None)
    made_here = [s for s in sources if block_of[s] == block_of[readers[0]]]
    source = made_here[-1] if made_here else f"{readers[0]}.input"
    return TracedInput(source, readers, None, is_product=product)


def _shared_heads(channels: torch.Tensor) -> tuple[int, int] | None:
    """Number of times that heads of channels [K] are read, and their size; None: no heads."""
    count = int(channels.max()) + 1
    if not torch.equal(torch.unique(channels), torch.arange(count)) or channels.numel() % count:
        return None
    times = channels.numel() // count
    if times == 1:
        return (1, 1) if torch.equal(channels, torch.arange(count)) else None
    again = (channels == 0).nonzero()
    head = int(again[1])
    if count % head:
        return None
    expected = torch.arange(count).view(-1, head).repeat_interleave(times, dim=0).flatten()
    return (times, head) if torch.equal(channels, expected) else None


@torch.no_grad()
def _norm_offset(module: nn.Module) -> float | None:
    """The constant that a norm adds to its weight; None: no norm with one factor per channel."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1:
        return None
    twin: Any = copy.copy(module)
    twin._parameters = {
        name: p if p is None else torch.zeros_like(p, device="cpu", dtype=torch.float32)
        for name, p in module._parameters.items()
    }
    x = torch.linspace(0.5, 2.0, weight.numel())[None]
    try:
        at_zero = twin(x)
        twin._parameters["weight"] = torch.ones_like(x[0])
        step = twin(x) - at_zero
    except Exception:  # of any class: norms of two inputs
        return None
    if at_zero.shape != x.shape or not bool((step != 0).all()):
        return None
    offset = at_zero / step
    constant = round(float(offset.mean()), 4)
    return (
        constant if torch.allclose(offset, torch.full_like(offset, constant), atol=1e-4) else None
    )


def _run(
    model: nn.Module, blocks: Sequence[str], names: Sequence[str], norms: Mapping[str, float]
) -> _Record:
    """Run the model on the meta device, with its parameters replaced."""
    follower = _Follower()
    handles: list[Any] = []
    for name in names:
        handles += follower.watch(name, model.get_submodule(name), is_layer=True)
    for name in norms:
        handles += follower.watch(name, model.get_submodule(name), is_layer=False)
    handles += [follower.watch_block(name, model.get_submodule(name)) for name in blocks]
    state = {n: t.to(_META) for n, t in (*model.named_parameters(), *model.named_buffers())}
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=_META)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), follower:
            functional_call(model, state, (), {"input_ids": ids, "use_cache": False})
        follower.record.is_whole = True
    except Exception as error:  # of any class: code that needs values, or other inputs
        log.debug("%s can't be traced: %s", type(model).__name__, error)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return follower.record


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows channels through the operations of a forward pass on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = _Record()
        self._channels: dict[int, _Channels] = {}  # by the id of a tensor
        self._alive: list[torch.Tensor] = []  # so that no id is used twice
        self._products: set[int] = set()
        self._inside = 0

    def watch(self, name: str, module: nn.Module, *, is_layer: bool) -> list[Any]:
        """Hook a linear layer or a norm; returns the hooks' handles."""

        def enter(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            inputs = [t for t in tree_leaves((args, keywords)) if isinstance(t, torch.Tensor)]
            if is_layer and not self._inside:
                self._read(name, inputs[0])
            else:
                self._end(inputs)
            self._inside += 1

        def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside -= 1
            self.record.calls[name] += 1
            if isinstance(output, torch.Tensor) and not self._inside:
                own = torch.arange(output.shape[-1]).expand(output.shape)
                self._set(output, {name: own})

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]

    def watch_block(self, name: str, module: nn.Module) -> Any:
        """Hook a block, to recognize its own input."""

        def enter(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            for tensor in tree_leaves((args, keywords)):
                if isinstance(tensor, torch.Tensor):
                    self._alive.append(tensor)
                    self.record.block_inputs[_key(tensor)] = name
                    break

        return module.register_forward_pre_hook(enter, with_kwargs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        keywords = dict(kwargs or {})
        on_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if on_meta and func is torch.ops.aten._local_scalar_dense.default:  # a decision on values
            return False if args[0].dtype is torch.bool else 1
        if on_meta and func is torch.ops.aten.nonzero.default:
            return torch.empty(_TOKENS, args[0].ndim, dtype=torch.int64, device=_META)
        output = func(*args, **keywords)
        if not self._inside:
            self._follow(func, args, keywords, output)
        return output

    def _follow(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        inputs = [t for t in tree_leaves((args, keywords)) if isinstance(t, torch.Tensor)]
        name = func.overloadpacket.__name__
        is_product = (
            name == "mul"
            and len(inputs) == 2
            and inputs[0] is not inputs[1]
            and inputs[0].shape == inputs[1].shape
        )
        is_same = name in _AS_IS or name in _LAYOUT
        if is_product or (is_same and any(id(t) in self._products for t in inputs)):
            self._alive += [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
            self._products |= {id(t) for t in tree_leaves(output)}
        present = dict.fromkeys(s for t in inputs for s in self._of(t))
        if not present:
            return
        kept: dict[str, Any] = {}
        if name in _AS_IS:
            kept = dict(self._of(inputs[0]))
        elif name in _LAYOUT:
            kept = {source: self._moved(func, args, keywords, source) for source in present}
        elif name in ("mul", "div"):
            factors = inputs if name == "mul" else inputs[:1]
            for source in present:
                having = [t for t in factors if source in self._of(t)]
                if len(having) == 1 and len([t for t in inputs if source in self._of(t)]) == 1:
                    kept[source] = self._of(having[0])[source].broadcast_to(output.shape)
        elif name == "bmm":
            weights, values = args
            for source, channels in self._of(values).items():
                row = channels[:, :1]
                if source not in self._of(weights) and torch.equal(
                    channels, row.expand_as(channels)
                ):
                    kept[source] = row.expand(output.shape)
        self.record.ended |= present.keys() - kept.keys()
        outputs = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        for index, tensor in enumerate(outputs):
            moved = {s: c[index] if isinstance(c, list | tuple) else c for s, c in kept.items()}
            self._set(tensor, moved)

    def _moved(
        self, func: Any, args: tuple[Any, ...], keywords: dict[str, Any], source: str
    ) -> Any:
        def channels(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            own = self._of(leaf).get(source)
            return torch.full((1,), -1).expand(leaf.shape) if own is None else own

        try:
            return func(*tree_map(channels, args), **tree_map(channels, keywords))
        except RuntimeError:  # a view that the strides of expanded channels don't allow
            contiguous = tree_map(
                lambda x: x.contiguous() if isinstance(x, torch.Tensor) else x,
                tree_map(channels, args),
            )
            return func(*contiguous, **keywords)

    def _of(self, tensor: torch.Tensor) -> _Channels:
        return self._channels.get(id(tensor), {})

    def _set(self, tensor: torch.Tensor, channels: _Channels) -> None:
        self._alive.append(tensor)
        self._channels[id(tensor)] = {s: c for s, c in channels.items() if bool((c >= 0).any())}

    def _read(self, name: str, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)
        key = _key(tensor)
        self.record.inputs[name].append(key)
        channels = self._of(tensor)
        if id(tensor) in self._products:
            self.record.products.add(key)
        self.record.sources[key] = tuple(channels)
        for source, of_source in channels.items():
            rows = of_source.reshape(-1, of_source.shape[-1])
            self.record.readers[source].append((name, rows[0].clone()))
            if bool((rows != rows[0]).any()):
                self.record.ended.add(source)

    def _end(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.record.ended |= self._of(tensor).keys()


def _key(tensor: torch.Tensor) -> tuple[int, ...]:
    """Equal for views of the same elements."""
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.numel(), tensor._version

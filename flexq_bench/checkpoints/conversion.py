"""Stored tensors of a folder as those of its model, by transformers' own conversion of names.

transformers renames tensors of checkpoints, stacks experts, splits and transposes matrices while it
loads a model (`transformers.conversion_mapping`). Here the same conversion is applied to single
tensors when they are read. Where layers were separated (linear_layers), a layer is taken from the
converted tensor.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flexq_bench.checkpoints.errors import CheckpointError
from flexq_bench.checkpoints.safetensors_io import DTYPES, TensorInfo, read_tensor
from flexq_bench.errors import library_reason
from flexq_bench.schemes.linear_layers import Origin

_MANY = re.compile(r"\.(\d+)\.")


class StoredNames:
    """Names of a model's tensors by those in files.

    model: on the meta device, after linear_origins. origins: what that returned.
    """

    def __init__(self, model: Any, origins: Mapping[str, Origin]) -> None:
        self._base = str(model.base_model_prefix)
        names = {origins[name].name if name in origins else name for name in model.state_dict()}
        self._native = dict.fromkeys(names, True)
        renamings, converters = _transforms(model)
        self._renamings, self._converters = renamings, converters
        self._by_part: dict[tuple[str, int | None], list[str]] = {}
        for name, origin in origins.items():
            self._by_part.setdefault((origin.name, origin.index), []).append(name)

    def native(self, stored: str) -> tuple[str, Any, str]:
        """Return the tensor's name in transformers, and its converter with the pattern that fits.

        The converter is None, and the pattern empty, if the tensor is only renamed.
        """
        renamed, pattern = self._renamed(stored, self._renamings, self._converters)
        if renamed not in self._native and stored in self._native:
            renamed, pattern = stored, None
        elif renamed not in self._native:
            plain, _ = self._renamed(stored, [], [])
            if plain in self._native:
                renamed, pattern = plain, None
        if pattern is None:
            return renamed, None, ""
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        return renamed, converter, pattern

    def __contains__(self, native: str) -> bool:
        return native in self._native

    def separated(self, stored: str) -> str:
        """Return the tensor's name after linear_origins: that of a layer of a single expert, too.

        The name in transformers if no single layer has this tensor.
        """
        native, converter, pattern = self.native(stored)
        index = int(_MANY.findall(stored)[-1]) if "*" in pattern else None
        layers = self._by_part.get((native, index), [])
        if index is None or len(layers) != len(converter.source_patterns):
            alone = self._by_part.get((native, None), [])
            return alone[0] if len(alone) == 1 else native
        part: int = converter.source_patterns.index(pattern)
        return layers[part]

    def is_part(self, stored: str) -> bool:
        """Return True for a tensor that is converted, and is not a single layer of an expert."""
        native, converter, _ = self.native(stored)
        return converter is not None and self.separated(stored) == native

    def _renamed(
        self, stored: str, renamings: list[Any], converters: list[Any]
    ) -> tuple[str, str | None]:
        try:
            from transformers.core_model_loading import rename_source_key
        except ImportError:  # transformers 4
            base = f"{self._base}."
            other = stored.removeprefix(base) if stored.startswith(base) else base + stored
            is_other = stored not in self._native and other in self._native
            return str(other if is_other else stored), None
        renamed, pattern = rename_source_key(
            stored, renamings, converters, self._base or None, self._native
        )
        return str(renamed), pattern


def _transforms(model: Any) -> tuple[list[Any], list[Any]]:
    """Transforms of the model's class: renamings, and converters of several tensors."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming
    except ImportError:  # transformers 4, which packs nothing
        return [], []
    every = get_model_conversion_mapping(model)
    return (
        [transform for transform in every if isinstance(transform, WeightRenaming)],
        [transform for transform in every if isinstance(transform, WeightConverter)],
    )


class _WithOrigins:
    """A model whose converted layers also have the parameters that they came from, without values.

    Some of transformers' conversions ask for a parameter's shape.
    """

    def __init__(self, model: Any, origins: Mapping[str, Origin]) -> None:
        self.config = model.config
        self._model = model
        self._shapes = {origin.name: origin.shape for origin in origins.values()}

    def get_parameter(self, name: str) -> torch.Tensor:
        if name in self._shapes:
            return torch.empty(self._shapes[name], device="meta")
        return self._model.get_parameter(name)  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Conversion:
    """Stored tensors that become one or more of transformers'. stored: by pattern, in order."""

    model: _WithOrigins
    first: str
    converter: Any
    stored: dict[str, list[tuple[str, TensorInfo]]] = field(default_factory=dict)

    def convert(self, read: Callable[[TensorInfo, str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The converted tensors by name. Raises CheckpointError if they don't fit together."""
        converter = copy.deepcopy(self.converter)
        for pattern, tensors in self.stored.items():
            for name, info in tensors:
                converter.add_tensor(self.first, name, pattern, read(info, name))
        try:
            converted = converter.convert(self.first, model=self.model, config=self.model.config)
        except Exception as error:  # of any class: shapes that don't fit
            raise CheckpointError(
                f"{self.first} can't be made of its {sum(map(len, self.stored.values()))} stored "
                f"tensors ({library_reason(error)}): download it again"
            ) from error
        return {n: t[0] if isinstance(t, list) else t for n, t in converted.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of a tensor. source: where it is stored, or what it is converted from."""

    source: TensorInfo | _Conversion
    native: str
    origin: Origin | None
    shape: tuple[int, ...]


class ConvertedTensors:
    """A model's tensors, read from files when they are requested.

    unused: stored tensors that the model has no place for, by their names in transformers.
    """

    def __init__(
        self, model: Any, origins: Mapping[str, Origin], infos: Mapping[str, TensorInfo]
    ) -> None:
        names, whole = StoredNames(model, origins), _WithOrigins(model, origins)
        sources: dict[str, TensorInfo | _Conversion] = {}
        self.unused: list[str] = []
        for stored in sorted(infos, key=_natural):
            native, converter, pattern = names.native(stored)
            if native not in names or (converter is None and native in sources):
                self.unused.append(native)
            elif converter is None:
                sources[native] = infos[stored]
            else:
                group = sources.setdefault(native, _Conversion(whole, native, converter))
                if isinstance(group, _Conversion):
                    group.stored.setdefault(pattern, []).append((stored, infos[stored]))
        shapes: dict[str, tuple[int, ...]] = {}
        for native, source in list(sources.items()):
            if isinstance(source, TensorInfo):
                shapes[native] = source.shape
                continue
            for target, tensor in source.convert(_on_meta).items():
                sources[target], shapes[target] = source, tuple(tensor.shape)
        self.stored = {n: s for n, s in sources.items() if isinstance(s, TensorInfo)}
        self._places: dict[str, _Place] = {}
        for name in model.state_dict():
            origin = origins.get(name)
            native = name if origin is None else origin.name
            if native in sources:
                shape = _shape(origin, shapes[native])
                self._places[name] = _Place(sources[native], native, origin, shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by the model's names."""
        return {name: place.shape for name, place in self._places.items()}

    def read(
        self, names: Iterable[str], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read these tensors, each conversion once. Raises CheckpointError as read_tensor."""
        together: dict[int, list[str]] = {}
        for name in names:
            source = self._places[name].source
            if isinstance(source, _Conversion):
                together.setdefault(id(source), []).append(name)
            else:
                yield name, self._direct(name).to(device)
        for group in together.values():
            source = self._places[group[0]].source
            assert isinstance(source, _Conversion)
            converted = source.convert(read_tensor)
            for name in group:
                place = self._places[name]
                tensor = converted[place.native]
                own = tensor if place.origin is None else place.origin.take(tensor)
                yield name, own.contiguous().to(device)

    def _direct(self, name: str) -> torch.Tensor:
        place = self._places[name]
        info, origin = place.source, place.origin
        assert isinstance(info, TensorInfo)
        if origin is None:
            return read_tensor(info, name)
        if origin.index is not None and len(info.shape) > 2:  # one expert's matrix only
            info, origin = info.rows(origin.index, 0, info.shape[1]), replace(origin, index=None)
        return origin.take(read_tensor(info, name)).contiguous()


def _shape(origin: Origin | None, native: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a layer's weight; that of the whole tensor if it has no such part."""
    if origin is None:
        return native
    try:
        return tuple(origin.take(torch.empty(native, device="meta")).shape)
    except (IndexError, RuntimeError):
        return native


def _on_meta(info: TensorInfo, name: str) -> torch.Tensor:
    return torch.empty(info.shape, dtype=DTYPES[info.dtype], device="meta")


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Key of an order in which expert 10 comes after expert 9, as transformers stacks them."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]

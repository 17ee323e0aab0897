"""Model and layer filters: a result belongs to every model that has its shape.

The labels of a measurement are those of its suite; another suite may label the same shape with
another model, or not at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from flexq_bench.workloads.models import load_catalog

Shape = tuple[int, int]  # N, K
ModelLayer = tuple[str, str]


def places_in_models(shapes: Iterable[Shape]) -> dict[ModelLayer, set[Shape]]:
    """Return, by model and layer of the catalog, which of these shapes it has."""
    all_shapes = set(shapes)
    places = defaultdict(set)
    for model in load_catalog().values():
        for layer in model.all_layers():
            if (layer.n, layer.k) in all_shapes:
                places[model.name, layer.name].add((layer.n, layer.k))
    return dict(places)


def places_of_frame(frame: pd.DataFrame) -> dict[ModelLayer, set[Shape]]:
    """Return places_in_models of a frame's shapes, extended by the frame's own labels.

    frame: has columns model, layer, n and k. A model measured from its own configuration file is
    not in the catalog.
    """
    places = places_in_models(zip(frame["n"].tolist(), frame["k"].tolist(), strict=True))
    for model, layer, n, k in _labels(frame):
        if model or layer:
            places.setdefault((model, layer), set()).add((n, k))
    return places


def models_and_layers(
    places: Mapping[ModelLayer, set[Shape]], models: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return the models and layers that filters offer, sorted.

    models: if any are given, only their layers are returned.
    """
    names = sorted({model for model, _ in places if model})
    layers = {layer for model, layer in places if layer and (not models or model in models)}
    return names, sorted(layers)


def narrowed_to(
    frame: pd.DataFrame,
    places: Mapping[ModelLayer, set[Shape]],
    models: Sequence[str],
    layers: Sequence[str],
) -> pd.DataFrame:
    """Return the rows whose shape is in these models and layers, labelled with one of them.

    models, layers: empty: all. Without both, all rows are kept, with one label per shape.
    """
    by_shape: dict[Shape, list[ModelLayer]] = defaultdict(list)
    for place, shapes in places.items():
        model, layer = place
        if (not models or model in models) and (not layers or layer in layers):
            for shape in shapes:
                by_shape[shape].append(place)
    if models or layers:
        keys = zip(frame["n"].tolist(), frame["k"].tolist(), strict=True)
        frame = frame[[key in by_shape for key in keys]]
    stored: dict[Shape, Counter[ModelLayer]] = defaultdict(Counter)
    for model, layer, n, k in _labels(frame):
        if model or layer:
            stored[n, k][model, layer] += 1
    names = [
        _name((n, k), by_shape.get((n, k), []), stored[n, k], filtered=bool(models or layers))
        for n, k in zip(frame["n"].tolist(), frame["k"].tolist(), strict=True)
    ]
    return frame.assign(model=[model for model, _ in names], layer=[layer for _, layer in names])


def _name(
    shape: Shape, fitting: Sequence[ModelLayer], stored: Counter[ModelLayer], *, filtered: bool
) -> ModelLayer:
    """Return the model and layer that label a shape.

    This is the most frequent label of the shape's stored results that matches the filters.
    filtered: a filter is set.
    """
    allowed = {place: count for place, count in stored.items() if not filtered or place in fitting}
    # Prefer layers of a model to labels that only repeat the size.
    allowed = {place: count for place, count in allowed.items() if place[0]} or allowed
    if allowed:
        return min(allowed, key=lambda place: (-allowed[place], place))
    return min(fitting) if filtered and fitting else ("", "")


def _labels(frame: pd.DataFrame) -> Iterable[tuple[str, str, int, int]]:
    columns = (frame[name].tolist() for name in ("model", "layer", "n", "k"))
    return zip(*columns, strict=True)

"""Suites as data files: those that come with the package, and a user's own by path.

description = "what it is for"
source = "where its shapes come from"          # optional

[[group]]                                      # one or more; each is combined with itself only
kernels = ["flexq-w6a6", "cublas*"]            # labels or globs
m = "1,4:64:x2"                                # see workloads.ranges
models = ["llama-7b"]                          # with: layers = "fused" (default), "separate",
                                               #       or layers by name
shapes = ["256x1376"]                          # or, in place of models: N x K
stages = ["gemm", "linear"]                    # default: gemm
caches = ["cold", "hot"]                       # default: cold
"""

from __future__ import annotations

import os
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar, get_args

from workloads.case import CacheMode, Stage
from workloads.errors import WorkloadError
from workloads.gemm import GemmWorkload
from workloads.models import get_model
from workloads.names import unknown
from workloads.patterns import check_pattern
from workloads.ranges import parse_ranges
from workloads.suite import Group, Shape, Suite, layer_shapes
from workloads.tomlfile import Table, read_toml

__all__ = ["Group", "Shape", "Suite", "layer_shapes", "list_suites", "load_suite"]

_FILE_KEYS = ("description", "source", "group")
_GROUP_KEYS = ("kernels", "m", "models", "layers", "shapes", "stages", "caches")
_STAGES: tuple[Stage, ...] = get_args(Stage)
_CACHES: tuple[CacheMode, ...] = get_args(CacheMode)
_SHAPE = re.compile(r"(?P<n>[0-9]{1,18})x(?P<k>[0-9]{1,18})")

Word = TypeVar("Word", Stage, CacheMode)


def list_suites() -> tuple[str, ...]:
    """Names of the suites that come with the package."""
    return tuple(sorted(_bundled()))


def load_suite(name_or_path: str | Path, folder: Traversable | None = None) -> Suite:
    """A suite of the package by name, or one of the user's own by the path of its `.toml`.

    folder: where the suites are that have names; None: in the package.
    Raises WorkloadError if there is none (the nearest names first) or its file has another form.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text:
        return read_suite(Path(text))
    bundled = _bundled(folder)
    if text not in bundled:
        raise WorkloadError(f"{unknown('suite', text, sorted(bundled))}; or give a .toml file")
    return read_suite(bundled[text])


def read_suite(file: Traversable) -> Suite:
    """A suite named after its file. Raises WorkloadError that names the file, group and key."""
    table = Table(read_toml(file), file.name, _FILE_KEYS)
    groups = tuple(
        _read_group(Table(values, f"{file.name}, group {position}", _GROUP_KEYS))
        for position, values in enumerate(table.tables("group"), start=1)
    )
    return Suite(
        name=file.name.removesuffix(".toml"),
        description=table.text("description"),
        source=table.text("source", default=""),
        groups=groups,
    )


def _bundled(folder: Traversable | None = None) -> dict[str, Traversable]:
    files = (folder or resources.files("workloads") / "suites").iterdir()
    return {f.name.removesuffix(".toml"): f for f in files if f.name.endswith(".toml")}


def _read_group(table: Table) -> Group:
    kernels, m = table.texts("kernels"), table.text("m")
    stages = table.texts("stages", default=("gemm",))
    caches = table.texts("caches", default=("cold",))
    with table.blame("kernels"):
        kernels = tuple(map(check_pattern, kernels))
    with table.blame("m"):
        sizes = parse_ranges(m)
    with table.blame("stages"):
        known_stages = _words("stage", stages, _STAGES)
    with table.blame("caches"):
        known_caches = _words("cache", caches, _CACHES)
    return Group(kernels, sizes, _read_shapes(table), known_stages, known_caches)


def _read_shapes(table: Table) -> tuple[Shape, ...]:
    if ("models" in table) == ("shapes" in table):
        raise WorkloadError(f"{table.where}: give either models or shapes")
    if "shapes" in table:
        if "layers" in table:
            raise WorkloadError(f"{table.where}: layers go with models, shapes have none")
        shapes = table.texts("shapes")
        with table.blame("shapes"):
            return tuple(map(_parse_shape, shapes))
    models, layers = table.texts("models"), table.text_or_texts("layers", default="fused")
    with table.blame("models"):
        specs = [get_model(name) for name in models]
    with table.blame("layers"):
        return layer_shapes(specs, layers)


def _parse_shape(text: str) -> Shape:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise WorkloadError(f"a shape is written NxK, for example 4096x11008, got {text!r}")
    gemm = GemmWorkload(1, int(match["n"]), int(match["k"]))
    return Shape(gemm.n, gemm.k, layer=f"{gemm.n}x{gemm.k}")


def _words(kind: str, asked: tuple[str, ...], known: tuple[Word, ...]) -> tuple[Word, ...]:
    for word in asked:
        if word not in known:
            raise WorkloadError(unknown(kind, word, known))
    return tuple(word for word in known if word in asked)

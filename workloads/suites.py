"""Suite files: those of the package by name, and a user's own by path.

description = "purpose of the suite"
source = "origin of its shapes"                # optional

[[group]]                                      # one or more; the Cartesian product of its keys
kernels = ["flexq-w6a6", "cublas*"]            # labels or globs
m = "1,4:64:x2"                                # see workloads.ranges
models = ["llama-7b"]                          # with: layers = "fused" (default), "separate",
                                               #       or layers by name
shapes = ["256x1376"]                          # or, in place of models: N x K
stages = ["gemm", "linear"]                    # default: gemm
caches = ["cold", "hot"]                       # default: cold
regimes = ["boost", "sustained"]               # default: boost
"""

from __future__ import annotations

import os
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Self, TypeVar, get_args

from pydantic import model_validator

from flexq_bench.workloads.case import LINEAR_STAGES, CacheMode, Regime, Stage
from flexq_bench.workloads.data_files import (
    AnyText,
    DataTable,
    Entries,
    Text,
    Texts,
    error_prefix,
    must_be,
    parsed_text,
    parsed_texts,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.gemm import GemmWorkload
from flexq_bench.workloads.model_spec import ModelSpec
from flexq_bench.workloads.models import get_model
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import check_patterns
from flexq_bench.workloads.ranges import parse_ranges
from flexq_bench.workloads.suite import Group, Shape, Suite, layer_shapes

_CACHES: tuple[CacheMode, ...] = get_args(CacheMode)
_SHAPE = re.compile(r"(?P<n>[0-9]{1,18})x(?P<k>[0-9]{1,18})")

Word = TypeVar("Word", Stage, CacheMode, Regime)


def _parse_shape(text: str) -> Shape:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise WorkloadError(f"a shape is written NxK, for example 4096x11008, got {text!r}")
    gemm = GemmWorkload(1, int(match["n"]), int(match["k"]))
    return Shape(gemm.n, gemm.k, layer=f"{gemm.n}x{gemm.k}")


def _words(kind: str, names: tuple[str, ...], known: tuple[Word, ...]) -> tuple[Word, ...]:
    for word in names:
        if word not in known:
            raise WorkloadError(unknown(kind, word, known))
    return tuple(word for word in known if word in names)


Regimes = Annotated[
    tuple[Regime, ...], parsed_texts(lambda names: _words("regime", names, get_args(Regime)))
]


class _GroupTable(DataTable):
    """One group of a suite's file."""

    kernels: Annotated[tuple[str, ...], parsed_texts(check_patterns)]
    m: Annotated[tuple[int, ...], parsed_text(parse_ranges)]
    models: Annotated[
        tuple[ModelSpec, ...], parsed_texts(lambda names: tuple(map(get_model, names)))
    ] = ()
    layers: Annotated[Text | Texts | None, must_be("a string or a list of strings")] = None
    shapes: Annotated[
        tuple[Shape, ...], parsed_texts(lambda texts: tuple(map(_parse_shape, texts)))
    ] = ()
    stages: Annotated[
        tuple[Stage, ...], parsed_texts(lambda names: _words("stage", names, LINEAR_STAGES))
    ] = ("gemm",)
    caches: Annotated[
        tuple[CacheMode, ...], parsed_texts(lambda names: _words("cache", names, _CACHES))
    ] = ("cold",)
    regimes: Regimes = ("boost",)

    @model_validator(mode="after")
    def _check_shapes(self) -> Self:
        if bool(self.models) == bool(self.shapes):
            raise WorkloadError("give either models or shapes")
        if self.shapes and self.layers is not None:
            raise WorkloadError("layers go with models, shapes have none")
        self._shapes()
        return self

    def group(self) -> Group:
        return Group(self.kernels, self.m, self._shapes(), self.stages, self.caches, self.regimes)

    def _shapes(self) -> tuple[Shape, ...]:
        if self.shapes:
            return self.shapes
        with error_prefix("layers"):
            return layer_shapes(self.models, self.layers or "fused")


class _SuiteTable(DataTable):
    """A suite's file."""

    description: Text
    source: AnyText = ""
    group: Entries[_GroupTable]


def list_suites() -> tuple[str, ...]:
    """Return the names of the suites in the package."""
    return tuple(sorted(_bundled()))


def load_suite(name_or_path: str | Path, folder: Traversable | None = None) -> Suite:
    """Load a suite of the package by name, or a user's own by the path of its `.toml`.

    folder: folder of the named suites; None: the package's. Raises WorkloadError if there is no
    such suite (the nearest names first) or its file is invalid.
    """
    text = os.fspath(name_or_path)
    if text.endswith(".toml") or os.sep in text:
        return read_suite(Path(text))
    bundled = _bundled(folder)
    if text not in bundled:
        raise WorkloadError(f"{unknown('suite', text, sorted(bundled))}; or give a .toml file")
    return read_suite(bundled[text])


def read_suite(file: Traversable) -> Suite:
    """Load a suite from a file and name it after the file.

    Raises WorkloadError with the file, group and key.
    """
    table = validated(_SuiteTable, read_toml(file), file.name)
    return Suite(
        name=file.name.removesuffix(".toml"),
        description=table.description,
        source=table.source,
        groups=tuple(group.group() for group in table.group),
    )


def _bundled(folder: Traversable | None = None) -> dict[str, Traversable]:
    files = (folder or resources.files("flexq_bench") / "workloads" / "suites").iterdir()
    return {f.name.removesuffix(".toml"): f for f in files if f.name.endswith(".toml")}

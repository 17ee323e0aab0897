"""Functions that measure and judge, and those that they stand on: replaced by a kernel's code?

A kernel from outside runs in the process that times it and could replace the clock, or the check.
What is kept here is what each name meant before its code was imported. A gate does not rely on it:
it judges from another process (`flexq_bench.measure.ab.judged_sides`).
"""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module

import torch

from flexq_bench.measure import frame_access
from kernels.outside import foreign_code

# Modules whose functions and classes are kept, by the beginning of their names.
_OURS = (
    *("flexq_bench.measure", "kernels.reference", "kernels.formats", "kernels.cuda.clock_stamps"),
    "kernels.runtime.graph_capture",
)
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns")
_TORCH = ("abs", "equal", "isnan", "isinf", "maximum", "where", "tensor", "empty", "full", "randn")
_CUDA = ("Event", "CUDAGraph", "Stream", "graph", "stream", "synchronize", "current_stream")
_CLASSES = ("Event", "CUDAGraph", "Stream")
_TENSOR = ("abs", "all", "copy_", "double", "half", "max", "__le__", "__eq__", "__getitem__")

_Meaning = tuple[object, ...]
_known: dict[str, _Meaning] = {}


def watch() -> None:
    """Keep what the names mean now; of no effect where they are kept already."""
    if not _known:
        # A module that comes later is not known: all that measures must be there. By its name, as
        # it imports this one.
        import_module("flexq_bench.measure.ab.operations")
        _known.update(_meanings())
        frame_access.listen()


def forget() -> None:
    """Watch no more."""
    _known.clear()
    frame_access.forget()


def found() -> str:
    """Describe tampering: a replaced name, or a read that frame_access noted; empty: none."""
    if not _known:
        return ""
    now = dict(_meanings())
    for name, meaning in _known.items():
        if name not in now or not _same(now[name], meaning):
            return f"its code replaced {name}, which measures it: its times are not believed"
    return frame_access.found()


def _same(first: _Meaning, second: _Meaning) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _meanings() -> Iterator[tuple[str, _Meaning]]:
    yield from _of("time", {name: getattr(time, name) for name in _CLOCKS})
    yield from _of("torch", {name: getattr(torch, name) for name in _TORCH})
    yield from _of("torch.Tensor", {name: getattr(torch.Tensor, name, None) for name in _TENSOR})
    yield from _of("torch.cuda", {name: getattr(torch.cuda, name, None) for name in _CUDA})
    for name in _CLASSES:
        yield from _of_class(f"torch.cuda.{name}", getattr(torch.cuda, name))
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) and module is not None and name != __name__:
            yield from _of_module(name, module)


def _of_module(name: str, module: types.ModuleType) -> Iterator[tuple[str, _Meaning]]:
    members = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type)
    }
    yield from _of(name, members)
    for key, value in members.items():
        if isinstance(value, type) and value.__module__ == name:
            yield from _of_class(f"{name}.{key}", value)


def _of_class(name: str, owner: type) -> Iterator[tuple[str, _Meaning]]:
    members = {k: v for k, v in vars(owner).items() if isinstance(v, types.FunctionType | property)}
    yield from _of(name, members)


def _of(owner: str, members: Mapping[str, object]) -> Iterator[tuple[str, _Meaning]]:
    for key, value in members.items():
        parts: list[object] = [value]
        with suppress(AttributeError):
            function: types.FunctionType = value  # type: ignore[assignment]  # or it has no code
            parts += [function.__code__, *(function.__defaults__ or ())]
        yield f"{owner}.{key}", tuple(parts)


# Code of installed packages is imported by the registry, whoever looks at it first.
foreign_code.before_import(watch)

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
from functools import cache
from importlib import import_module

import torch

from flexq_bench.measure import frame_access
from kernels.outside import foreign_code

# Modules whose functions and classes are kept, by the beginning of their names.
_OURS = (
    *("flexq_bench.measure", "flexq_bench.stats", "kernels.reference", "kernels.formats"),
    *("kernels.cuda.clock_stamps", "kernels.runtime.graph_capture"),
)
_CLOCKS = (
    *("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"),
    "process_time_ns",
)
_CUDA = ("Event", "CUDAGraph", "Stream", "graph", "stream", "synchronize", "current_stream")
_CLASSES = ("Event", "CUDAGraph", "Stream")
# Of these, what the functions above name: they stand on it.
_LIBRARIES = ("torch", "torch.Tensor", "numpy", "statistics", "math", "random")
_SYNTAX = frozenset(  # of a tensor, which no name tells
    f"__{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "le", "eq", "getitem")
)
_OWN_WRAPPERS = ("torch.manual_seed",)  # torch exchanges it itself where torch.compile is imported
# Operators that outputs are kept and judged by, and the devices that they are registered for.
_OPERATORS = ("index_select.out", "copy_", "add.Tensor", "sub.Tensor", "abs", "div.Tensor", "mm")
_REGISTERED = ("CPU: ", "CUDA: ")

_Meaning = tuple[object, ...]
_known: dict[str, _Meaning] = {}
_modes: list[str] = []  # of torch, active where outputs were kept


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
    _modes.clear()
    frame_access.forget()


def found() -> str:
    """Describe tampering: a replaced name, or a read that frame_access noted; empty: none."""
    if not _known:
        return ""
    now = dict(_meanings())
    for name, meaning in _known.items():
        if name not in now or not _same(now[name], meaning):
            return f"its code replaced {name}, which measures it: its times are not believed"
    note_modes()
    if _modes:
        return f"its code left the mode {_modes[0]} of torch active: its results are not believed"
    return frame_access.found()


def note_modes() -> None:
    """Note a mode of others that is active now, in which torch's functions do what it says."""
    if not _known or _modes:
        return
    stacks = (
        (torch._C._len_torch_function_stack(), torch._C._get_function_stack_at),
        (torch._C._len_torch_dispatch_stack(), torch._C._get_dispatch_stack_at),
    )
    for length, at in stacks:
        kinds = [type(at(i)) for i in range(length)]
        # One of torch's own says on which device tensors are made.
        _modes.extend(k.__name__ for k in kinds if not k.__module__.startswith("torch."))


def _same(first: _Meaning, second: _Meaning) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _meanings() -> Iterator[tuple[str, _Meaning]]:
    yield from _of("time", {name: getattr(time, name) for name in _CLOCKS})
    for operator in _OPERATORS:
        described = torch._C._dispatch_dump(f"aten::{operator}").splitlines()
        registered = "\n".join(line for line in described if line.startswith(_REGISTERED))
        yield f"the operator aten::{operator}", (sys.intern(registered),)
    yield from _of("torch.cuda", {name: getattr(torch.cuda, name, None) for name in _CUDA})
    for name in _CLASSES:
        yield from _of_class(f"torch.cuda.{name}", getattr(torch.cuda, name))
    named: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) and module is not None and name != __name__:
            yield from _of_module(name, module)
            named |= _names_in(module)
    for library in _LIBRARIES:
        yield from _of(library, _members_of(library, named))


def _members_of(library: str, named: set[str]) -> dict[str, object]:
    """Functions of a module or class with one of these names."""
    owner: object = sys.modules.get(library, getattr(torch, library.rpartition(".")[2], None))
    if owner is torch.Tensor:  # what it inherits, too
        members = {name: getattr(owner, name, None) for name in named | _SYNTAX}
    else:
        members = {name: value for name, value in list(vars(owner).items()) if name in named}
    return {
        name: member
        for name, member in members.items()
        if callable(member)
        and not isinstance(member, types.MethodType)  # another object each time
        and (name in _SYNTAX or not name.startswith("__"))
        and f"{library}.{name}" not in _OWN_WRAPPERS
    }


@cache  # its code as it was at first
def _names_in(module: types.ModuleType) -> set[str]:
    """Names of attributes and globals in the code of a module's own functions and methods."""
    values = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    members = [m for one in values if isinstance(one, type) for m in vars(one).values()]
    functions = [getattr(one, "fget", None) or one for one in (*values, *members)]
    codes = [one.__code__ for one in functions if isinstance(one, types.FunctionType)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return names


def _of_module(name: str, module: types.ModuleType) -> Iterator[tuple[str, _Meaning]]:
    members = {
        key: value
        for key, value in vars(module).items()
        if isinstance(
            value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType | type
        )
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

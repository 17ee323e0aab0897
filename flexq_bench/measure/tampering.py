"""Detection of functions of the measurement and its checks that a kernel's code replaced.

An external kernel runs in the process that times it and could replace the clock or the check. This
module stores the value of each name before the external code is imported, and compares later. A
gate does not rely on it: it judges results in another process
(`flexq_bench.measure.ab.judged_sides`).
"""

from __future__ import annotations

import builtins
import operator
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TypeGuard

import torch

from flexq_bench.kernels.external import external_code
from flexq_bench.measure import frame_access

# Prefixes of the modules whose functions and classes are stored: what measures, floors and the
# shapes that they are for, and what encodes a worker's replies.
_OURS = (
    *("flexq_bench.measure", "flexq_bench.stats", "flexq_bench.kernels", "flexq_bench.workloads"),
    "json.encoder",
)
# Of these, constants too: others have large tables, and no limit that is judged by.
_WITH_CONSTANTS = (
    *("flexq_bench.measure", "flexq_bench.stats"),
    *("flexq_bench.kernels.reference", "flexq_bench.kernels.formats"),
    *("flexq_bench.kernels.contract", "flexq_bench.kernels.external"),
    *("flexq_bench.kernels.cpu.probes", "flexq_bench.kernels.cuda.probes"),
)
_CLOCKS = (
    *("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns"),
    "process_time_ns",
)
_CUDA = ("Event", "CUDAGraph", "Stream", "graph", "stream", "synchronize", "current_stream")
_CLASSES = ("Event", "CUDAGraph", "Stream")
# Of these modules, the functions that the code above uses.
_LIBRARIES = (
    *("torch", "torch.Tensor", "numpy", "statistics", "math", "random", "secrets", "hashlib"),
    *("builtins", "json", "os", "resource"),
)
_BUILTINS = frozenset(name for name in dir(builtins) if name[0] != "_")
_SYNTAX = frozenset(  # operators of a tensor, which the code uses without their names
    f"__{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "le", "eq", "getitem")
)
_OWN_WRAPPERS = ("torch.manual_seed",)  # torch replaces it itself when torch.compile is imported
# Operators of torch that the code calls by syntax, or that functions which it names call.
_BEHIND_SYNTAX = (
    *("add", "sub", "mul", "div", "mm", "le", "lt", "ge", "gt", "eq", "ne", "bitwise_and"),
    *("bitwise_not", "select", "slice", "index", "index_put_", "expand", "transpose", "alias"),
    *("as_strided", "constant_pad_nd", "scalar_tensor", "lift_fresh", "_to_copy"),
    *("_local_scalar_dense", "_index_put_impl_", "_reshape_alias", "_unsafe_view", "detach_"),
    *("empty_strided", "is_nonzero", "item", "masked_fill_", "resize_", "resolve_conj"),
    *("resolve_neg", "numpy_T", "normal_", "random_", "uniform_"),
    *("__and__", "__lshift__", "__rshift__"),
)
# Dispatch keys that are active without any mode, transform or autocast.
_DISPATCH_KEYS = torch._C._dispatch_tls_local_include_set().raw_repr()
_LAZY = ("__annotations__", "__slotnames__")  # attributes that Python gives a class on first use
_FIXED = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_MONITORING_TOOLS = 6  # most that Python has
_CACHED = type(cache(len))
_WITH_FUNCTIONS = (types.FunctionType, property, staticmethod, classmethod, _CACHED)
_HEAP_TYPE = 1 << 9  # flag of classes that are defined in Python

_Meaning = tuple[object, ...]
_known: dict[str, _Meaning] = {}
_active: list[str] = []  # foreign hooks that were active while outputs were copied


def watch() -> None:
    """Store the current values of the names; no effect if they are stored already.

    All modules that measure must be imported before: later ones are unknown.
    """
    if not _known:
        _known.update(_meanings())
        frame_access.listen()


def forget() -> None:
    """Stop watching."""
    _known.clear()
    _active.clear()
    frame_access.forget()


def detected() -> str:
    """Describe tampering: a replaced name, or a read that frame_access recorded; empty: none."""
    if not _known:
        return ""
    now = dict(_meanings())
    for name, meaning in _known.items():
        if name not in now or not _same(now[name], meaning):
            return f"its code replaced {name}, which measures it: its times are not believed"
    note_active()
    _active.extend(_handled_signals())
    _active.extend(_running_threads())
    if _active:
        return f"its code left {_active[0]} active: its results are not believed"
    return frame_access.detected()


def note_active() -> None:
    """Record foreign hooks that are active now.

    These are modes and dispatch keys of torch, which redefine its functions, and trace or profile
    functions and torch's frame evaluators, which are called with the frames of other code.
    """
    if not _known or _active:
        return
    stacks = (
        (torch._C._len_torch_function_stack(), torch._C._get_function_stack_at),
        (torch._C._len_torch_dispatch_stack(), torch._C._get_dispatch_stack_at),
    )
    for length, at in stacks:
        kinds = [type(at(i)) for i in range(length)]
        # torch's own mode for the default device of tensors.
        external_modes = (kind for kind in kinds if not kind.__module__.startswith("torch."))
        _active.extend(f"the mode {kind.__name__} of torch" for kind in external_modes)
    if torch._C._dispatch_tls_local_include_set().raw_repr() & ~_DISPATCH_KEYS:
        _active.append("a dispatch key of torch")
    hearing = {"a trace function": sys.gettrace(), "a profile function": sys.getprofile()}
    _active.extend(what for what, now in hearing.items() if _is_of_others(now))
    if callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()):
        _active.append("a frame evaluator of torch")


def _handled_signals() -> Iterator[str]:
    """Signals with a foreign handler, which is called with the interrupted frame."""
    handlers = ((number, signal.getsignal(number)) for number in signal.valid_signals())
    for number, handler in handlers:
        if callable(handler) and _is_of_others(handler):
            yield f"a handler of {signal.Signals(number).name}"


def _running_threads() -> Iterator[str]:
    """Other threads of Python that run foreign code, which could slow down the floor."""
    for thread, frame in sys._current_frames().items():
        below: types.FrameType | None = frame
        while thread != threading.get_ident() and below is not None:
            if external_code.is_external(below.f_code.co_filename):
                yield f"a thread in {below.f_code.co_name}"
            below = below.f_back


def _is_of_others(function: object) -> bool:
    """Return True if a function, a method, or a callable instance comes from foreign code."""
    if function is None:
        return False
    function = getattr(function, "func", function)  # functools.partial
    called = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    code = getattr(called, "__code__", None)
    return isinstance(code, types.CodeType) and external_code.is_external(code.co_filename)


def _same(first: _Meaning, second: _Meaning) -> bool:
    return len(first) == len(second) and all(map(operator.is_, first, second))


def _meanings() -> Iterator[tuple[str, _Meaning]]:
    yield "tools of sys.monitoring", (sys.intern(" ".join(_monitoring_tools())),)
    yield from _of("time", {name: getattr(time, name) for name in _CLOCKS})
    # It gets the local variables of a function that imports.
    yield from _of("builtins", {"__import__": builtins.__import__})
    yield from _of("torch.cuda", {name: getattr(torch.cuda, name, None) for name in _CUDA})
    for name in _CLASSES:
        yield from _of_class(f"torch.cuda.{name}", getattr(torch.cuda, name))
    named: set[str] = set()
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) and module is not None and name != __name__:
            yield from _of_module(name, module)
            named |= _names_in(module)
    for name in _operators(frozenset(named)):
        yield f"the operator {name}", (sys.intern(torch._C._dispatch_dump(name)),)
    for library in _LIBRARIES:
        members = _members_of(library, named)
        yield f"the class of {library}", (type(_owner_of(library)),)
        yield from _of(library, members)
        for key, value in members.items():
            if _is_class_of(value, library) and value.__flags__ & _HEAP_TYPE:
                yield from _of_class(f"{library}.{key}", value)


@cache
def _operators(named: frozenset[str]) -> tuple[str, ...]:
    """Names of torch's operators, with all overloads, that have one of these names."""
    known = named.union(_BEHIND_SYNTAX)
    overloads = torch._C._dispatch_get_all_op_names()
    own = (name.removeprefix("aten::") for name in overloads if name.startswith("aten::"))
    return tuple(f"aten::{name}" for name in own if name.partition(".")[0] in known)


def _members_of(library: str, named: set[str]) -> dict[str, object]:
    """Functions and classes of a module or class with one of these names."""
    owner = _owner_of(library)
    if owner is torch.Tensor:  # including inherited ones
        members = {name: getattr(owner, name, None) for name in named | _SYNTAX}
    else:
        members = {name: value for name, value in list(vars(owner).items()) if name in named}
    return {
        name: member
        for name, member in members.items()
        if callable(member)
        # A bound method of a class is a new object at each access.
        and not (owner is torch.Tensor and isinstance(member, types.MethodType))
        and (name in _SYNTAX or not name.startswith("__"))
        and f"{library}.{name}" not in _OWN_WRAPPERS
    }


def _monitoring_tools() -> Iterator[str]:
    """Names of tools that are called for events of all code, from Python 3.12 on."""
    if monitoring := getattr(sys, "monitoring", None):
        yield from (str(monitoring.get_tool(tool)) for tool in range(_MONITORING_TOOLS))


def _owner_of(library: str) -> object:
    return sys.modules.get(library, getattr(torch, library.rpartition(".")[2], None))


@cache  # so that later changes of the code have no effect
def _names_in(module: types.ModuleType) -> set[str]:
    """Names of attributes and globals in the code of a module's own functions and methods."""
    values = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    members = [m for one in values if isinstance(one, type) for m in vars(one).values()]
    codes = [one.__code__ for value in (*values, *members) for one in _functions_of(value)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return names


def _of_module(name: str, module: types.ModuleType) -> Iterator[tuple[str, _Meaning]]:
    values = dict(vars(module))
    members = {key: value for key, value in values.items() if isinstance(value, _FIXED)}
    yield f"the class of {name}", (type(module),)
    for key, value in members.items():
        of = getattr(value, "__module__", None) or ""
        if of != name and of.startswith(_OURS):  # the parts are those of its own module
            yield f"{name}.{key}", (value,)
            continue
        yield f"{name}.{key}", _meaning_of(value)
        if _is_class_of(value, name):
            yield from _of_class(f"{name}.{key}", value)
    for key, value in values.items() if name.startswith(_WITH_CONSTANTS) else ():
        if key.isupper():
            yield f"{name}.{key}", tuple(_parts_of_constant(value))
    hidden = " ".join(key for key in values if key in _BUILTINS)
    yield f"a builtin function in {name}", (sys.intern(hidden),)


def _is_class_of(value: object, module: str) -> TypeGuard[type]:
    return isinstance(value, type) and value.__module__ == module


def _of_class(name: str, owner: type) -> Iterator[tuple[str, _Meaning]]:
    values = {k: v for k, v in list(vars(owner).items()) if k not in _LAZY}
    yield from _of(name, {k: v for k, v in values.items() if _is_descriptor(v)})
    yield f"attributes of {name}", (sys.intern(" ".join(values)),)


def _is_descriptor(value: object) -> bool:
    """Return True if an attribute of a class runs code when it is read or set in an instance."""
    kind = type(value)
    return hasattr(kind, "__get__") or hasattr(kind, "__set__") or hasattr(kind, "__delete__")


def _of(owner: str, members: Mapping[str, object]) -> Iterator[tuple[str, _Meaning]]:
    for key, value in members.items():
        yield f"{owner}.{key}", _meaning_of(value)


def _meaning_of(value: object) -> _Meaning:
    """A value, and what decides the results of its functions."""
    if not isinstance(value, _WITH_FUNCTIONS):
        return (value,)
    parts: list[object] = [value]
    for function in _functions_of(value):
        parts.append(function.__code__)
        if function.__defaults__:
            parts += function.__defaults__
        if function.__kwdefaults__:
            parts += function.__kwdefaults__.values()
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty cell
                parts.append(cell.cell_contents)
    return tuple(parts)


def _functions_of(value: object) -> Iterator[types.FunctionType]:
    """The functions of a function, a property, a static or class method, and the wrapped ones."""
    if isinstance(value, types.FunctionType):
        yield value
        if "__wrapped__" in vars(value):
            yield from _functions_of(vars(value)["__wrapped__"])
    elif isinstance(value, property):
        for function in (value.fget, value.fset):
            yield from _functions_of(function)
    elif isinstance(value, staticmethod | classmethod | _CACHED):
        yield from _functions_of(value.__wrapped__)


def _parts_of_constant(value: object) -> Iterator[object]:
    """A constant, and its parts: its fields, or its items."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        if is_dataclass(one) and not isinstance(one, type):
            waiting += [getattr(one, field.name, None) for field in fields(one)]
        elif isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one


# The registry imports the code of installed packages on first use.
external_code.before_import(watch)

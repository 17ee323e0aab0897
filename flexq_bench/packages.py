"""Packages that are not installed: required ones, and those of the extras of pyproject.toml.

Any package may be missing, so this module imports none when it is loaded.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata, util
from typing import Any

from flexq_bench.errors import MissingExtraError

PACKAGE = "flexq_bench"
_DISTRIBUTION = "flexq-bench"

# Modules that an extra brings, by their import names.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "models": ("transformers", "safetensors", "huggingface_hub"),
    "accuracy": ("lm_eval", "accelerate", "datasets", "gguf"),
    "fleet": ("ray",),
    "dashboard": ("streamlit", "plotly", "pandas"),
    "serve": ("starlette", "uvicorn", "httptools"),
    "served": ("aiohttp",),
    "notify": ("apprise", "requests"),
    "postgres": ("psycopg",),
    "parquet": ("pyarrow",),
    "plots": ("matplotlib",),
    "spreadsheets": ("openpyxl",),
    "static": ("cuda.bindings",),
    "peers": ("bitsandbytes", "torchao", "humming"),
    "cuda13": ("cupy", "nvmath", "triton"),
    "cuda12": ("cupy", "nvmath", "triton"),
}


@dataclass(frozen=True, slots=True)
class Missing:
    """A package that is not installed. needed_by: the package that requires it.

    requirement: an argument of pip, for example "pydantic<3,>=2.10".
    """

    name: str
    needed_by: str
    requirement: str


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: imports, and histories, are many objects and no garbage.

    With all packages loaded, it looks at 300,000 objects in .2 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def exported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its names on first use.

    modules: the module of each name, within the package.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{modules[name]}"), name)

    return find


def missing_packages() -> list[Missing]:
    """Missing packages among the required ones and their dependencies, sorted by name.

    Empty if this package itself is not installed, as its requirements are unknown then. Only
    `packaging` if that is missing, as it reads the requirements of the others.
    """
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        return [Missing("packaging", _DISTRIBUTION, "packaging")]
    missing: dict[str, Missing] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(_DISTRIBUTION, frozenset[str]())]
    while waiting:
        owner, extras = waiting.pop()
        if (owner, extras) in seen:
            continue
        seen.add((owner, extras))
        for requirement in map(Requirement, _requirements(owner)):
            marker, name = requirement.marker, _normal(requirement.name)
            if marker and not any(marker.evaluate({"extra": extra}) for extra in extras or {""}):
                continue
            try:
                metadata.distribution(name)
            except metadata.PackageNotFoundError:
                text = f"{requirement.name}{requirement.specifier}"
                missing.setdefault(name, Missing(name, owner, text))
            else:
                waiting.append((name, frozenset(requirement.extras)))
    return [missing[name] for name in sorted(missing)]


def install_command(missing: Iterable[Missing]) -> str:
    """Return the command that installs packages."""
    return " ".join([sys.executable, "-m pip install", *(f"'{m.requirement}'" for m in missing)])


def install_extra(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{_DISTRIBUTION}[{extra}]'"


def missing_modules(extra: str) -> list[str]:
    """Return the modules of an extra that are not installed, without importing the others."""
    return [module for module in EXTRAS[extra] if not _is_installed(module)]


def require_extra(extra: str, user: str, *, modules_of: str | None = None) -> None:
    """Raise MissingExtraError unless the modules of an extra are installed.

    user: the verb or option that needs it, for example "sweep --plot". modules_of: another extra,
    a part of this one, whose modules are sufficient.
    """
    if missing_modules(modules_of or extra):
        raise MissingExtraError(f"{user} needs the extra {extra}: {install_extra(extra)}")


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Explain a failed import in one line; None: a module of this package, so it is a defect."""
    module = (error.name or "").partition(".")[0]
    if not module or module == PACKAGE:
        return None
    for extra, modules in EXTRAS.items():
        if module in (name.partition(".")[0] for name in modules):
            return f"{module} is not installed: {install_extra(extra)}"
    missing = missing_packages()
    if not missing:
        return f"the module {module} is not installed: pip install flexq-bench brings all it needs"
    names = ", ".join(package.name for package in missing)
    return f"{names} not installed: {install_command(missing)}"


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):  # refused by a finder, or a module without a specification
        return False


def _requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

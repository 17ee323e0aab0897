"""Required packages that are not installed, determined with the standard library alone.

Any package may be missing, so this module imports no other.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

_DISTRIBUTION = "flexq-bench"
PACKAGE = "flexq_bench"
# A requirement (PEP 508): name, extras, versions, marker.
_REQUIREMENT = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[(?P<extras>[^\]]*)\])?\s*(?P<versions>[^;@]*)[^;]*"
    r"(?:;(?P<marker>.*))?",
    re.DOTALL,
)
_VERSIONS = ("python_version", "python_full_version", "implementation_version")


@dataclass(frozen=True, slots=True)
class Missing:
    """A package that is not installed. needed_by: the package that requires it.

    requirement: an argument of pip, for example "pydantic<3,>=2.10".
    """

    name: str
    needed_by: str
    requirement: str


def missing_packages() -> list[Missing]:
    """Missing packages among the required ones and their dependencies, sorted by name.

    Empty if this package itself is not installed, as its requirements are unknown then.
    """
    missing: dict[str, Missing] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(_DISTRIBUTION, frozenset[str]())]
    while waiting:
        owner, extras = waiting.pop()
        if (owner, extras) in seen:
            continue
        seen.add((owner, extras))
        for text in _requirements(owner):
            match = _REQUIREMENT.match(text)
            if match is None or not _applies(match["marker"], extras):
                continue
            name = _normal(match["name"])
            requested_extras = frozenset(filter(None, re.split(r"[\s,]+", match["extras"] or "")))
            try:
                metadata.distribution(name)
            except metadata.PackageNotFoundError:
                requirement = f"{match['name']}{''.join(match['versions'].split()).strip('()')}"
                missing.setdefault(name, Missing(name, owner, requirement))
            else:
                waiting.append((name, requested_extras))
    return [missing[name] for name in sorted(missing)]


def install_command(missing: Iterable[Missing]) -> str:
    """The command that installs packages."""
    return " ".join([sys.executable, "-m pip install", *(f"'{m.requirement}'" for m in missing)])


def explain_missing(error: ModuleNotFoundError) -> str | None:
    """Explain a failed import in one line; None: a module of this package, so it is a defect."""
    module = (error.name or "").partition(".")[0]
    if not module or module == PACKAGE:
        return None
    missing = missing_packages()
    if not missing:
        return f"the module {module} is not installed: pip install flexq-bench brings all it needs"
    names = ", ".join(one.name for one in missing)
    return f"{names} not installed: {install_command(missing)}"


def _requirements(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _applies(marker: str | None, extras: Iterable[str]) -> bool:
    """Return True if a marker (PEP 508) holds here, for any of the requested extras.

    A marker that can't be parsed holds unless it mentions an extra: reporting a package needlessly
    does less harm than not reporting a missing one.
    """
    if marker is None or not marker.strip():
        return True
    try:
        tree = ast.parse(marker.strip(), mode="eval").body
        return any(_holds(tree, _environment(extra)) for extra in extras or ("",))
    except (SyntaxError, ValueError, KeyError, TypeError):
        return "extra" not in marker


def _environment(extra: str) -> dict[str, str]:
    return {
        "extra": extra,
        "implementation_name": sys.implementation.name,
        "implementation_version": platform.python_version(),
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    }


def _holds(node: ast.expr, environment: dict[str, str]) -> bool:
    if isinstance(node, ast.BoolOp):
        parts = (_holds(part, environment) for part in node.values)
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        raise ValueError("no comparison")
    sides = (node.left, node.comparators[0])
    first_operand, right = (_value(side, environment) for side in sides)
    operator = node.ops[0]
    if isinstance(operator, ast.In | ast.NotIn):
        return (first_operand in right) == isinstance(operator, ast.In)
    as_versions = any(isinstance(side, ast.Name) and side.id in _VERSIONS for side in sides)
    first, second = (
        (_version(first_operand), _version(right)) if as_versions else ((first_operand,), (right,))
    )
    if isinstance(operator, ast.Eq | ast.NotEq):
        return (first == second) == isinstance(operator, ast.Eq)
    if isinstance(operator, ast.Lt | ast.LtE):
        return first < second or (isinstance(operator, ast.LtE) and first == second)
    return first > second or (isinstance(operator, ast.GtE) and first == second)


def _value(node: ast.expr, environment: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return environment[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("neither a name nor a text")


def _version(text: str) -> tuple[int | str, ...]:
    """Return the numbers of a version without trailing zeros: 3.11 equals 3.11.0."""
    numbers = [int(part) for part in re.findall(r"\d+", text)]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

"""No module imports itself by way of others."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import grimp
import networkx
import pytest

ROOT = Path(__file__).parents[2]
# A search in flexq_bench ends at folders without __init__.py, so they are named.
PACKAGES = (
    *("flexq_bench", "flexq_bench.kernels", "flexq_bench.workloads", "flexq_bench.db"),
    *("flexq_bench.dashboard", "flexq_bench.ci"),
)

BY_NAME = ("import_module", "__import__")


def imports_by_name(module: str, source: str) -> Iterator[str]:
    """Modules of ours that a module imports by calls with a literal name, absolute or relative."""
    if not any(name in source for name in BY_NAME):
        return
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and call.args:
            function = call.func
            name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            (argument, *_) = call.args
            if name in BY_NAME and isinstance(argument, ast.Constant):
                absolute = resolve_name(argument.value, module.rpartition(".")[0])
                if absolute.startswith("flexq_bench."):
                    yield absolute


def import_graph() -> networkx.DiGraph:
    """Imports of all modules, with those for annotations only and those by name.

    A package that exports names lazily imports them for annotations, too.
    """
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False, cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    for module in graph.modules:
        place = ROOT / module.replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            source = path.read_text() if path.is_file() else ""
            imports.add_edges_from((module, name) for name in imports_by_name(module, source))
    return imports


def import_cycles(imports: networkx.DiGraph) -> set[tuple[str, ...]]:
    """Modules that import each other, directly or by way of others: their names in order."""
    components = networkx.strongly_connected_components(imports)
    return {tuple(sorted(modules)) for modules in components if len(modules) > 1}


@pytest.mark.parametrize(
    ("imports", "cycles"),
    [
        ({"a": "b", "b": "c", "c": "d"}, set()),
        ({"a": "b", "b": "c", "c": "b", "d": "a"}, {("b", "c")}),
        ({"a": "bc", "b": "d", "c": "d", "d": "ae", "e": ""}, {("a", "b", "c", "d")}),
    ],
)
def test_cycles_are_found(imports, cycles):
    assert import_cycles(networkx.DiGraph(imports)) == cycles


def test_imports_by_name_are_found():
    source = """
importlib.import_module("flexq_bench.db.store")
def later():
    import_module(".gate", __package__), __import__("flexq_bench.ci"), import_module("torch")
"""
    found = {"flexq_bench.db.store", "flexq_bench.cli.gate", "flexq_bench.ci"}
    assert set(imports_by_name("flexq_bench.cli.app", source)) == found


def test_modules_import_each_other_in_one_direction():
    # An import that is put off, into a function or for annotations only, is an import.
    assert import_cycles(import_graph()) == set()

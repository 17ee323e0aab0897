"""No module imports itself by way of others."""

from __future__ import annotations

import grimp
import pytest

ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
# Those that are left. A cycle that is gone must go from here, too.
KNOWN = {("flexq_bench.cli.fleet_runs", "flexq_bench.cli.measuring")}


def import_cycles(graph: grimp.ImportGraph) -> set[tuple[str, ...]]:
    """Strongly connected modules of a graph, more than one each (Tarjan 1972), names in order."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_ones: list[str] = []
    cycles: set[tuple[str, ...]] = set()

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_ones.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in open_ones:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            at = open_ones.index(module)
            component, open_ones[at:] = open_ones[at:], []
            if len(component) > 1:
                cycles.add(tuple(sorted(component)))

    for module in graph.modules:
        if module not in order:
            visit(module)
    return cycles


@pytest.mark.parametrize(
    ("imports", "cycles"),
    [
        ({"a": "b", "b": "c", "c": "d"}, set()),
        ({"a": "b", "b": "c", "c": "b", "d": "a"}, {("b", "c")}),
        ({"a": "bc", "b": "d", "c": "d", "d": "ae", "e": ""}, {("a", "b", "c", "d")}),
    ],
)
def test_cycles_are_found(imports, cycles):
    graph = grimp.ImportGraph()
    for module in set("abcde"):
        graph.add_module(module)
    for importer, imported in imports.items():
        for one in imported:
            graph.add_import(importer=importer, imported=one)

    assert import_cycles(graph) == cycles


def test_modules_import_each_other_in_one_direction():
    # Within functions, too: an import that is put off is an import. Annotations alone are none.
    graph = grimp.build_graph(*ROOMS, exclude_type_checking_imports=True, cache_dir=None)

    assert import_cycles(graph) == KNOWN

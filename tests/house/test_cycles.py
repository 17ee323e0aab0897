"""No module imports itself by way of others."""

from __future__ import annotations

import grimp
import networkx
import pytest

# A search in flexq_bench ends at folders without __init__.py, so they are named.
PACKAGES = (
    *("flexq_bench", "flexq_bench.kernels", "flexq_bench.workloads", "flexq_bench.db"),
    *("flexq_bench.dashboard", "flexq_bench.ci"),
)


def import_cycles(graph: grimp.ImportGraph) -> set[tuple[str, ...]]:
    """Modules that import each other, directly or by way of others: their names in order."""
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    together = networkx.strongly_connected_components(imports)
    return {tuple(sorted(modules)) for modules in together if len(modules) > 1}


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
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)

    assert import_cycles(graph) == set()

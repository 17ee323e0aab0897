"""Print figures of a checkout's structure: lines by package, the longest parameter list, circles.

    python benchmarks/house/figures.py [FOLDER]

FOLDER: a checkout, of any layout; default: this one. Circles count every import of the product:
within functions, for type checkers, and by `import_module` with a literal name.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx

ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
OTHERS = ("tests", "benchmarks")


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve()
    sources = {path: ast.parse(path.read_text()) for room in ROOMS for path in _files(root / room)}
    lines = Counter[str]()
    for room in (*ROOMS, *OTHERS):
        for path in _files(root / room):
            lines[_package(path.relative_to(root))] += len(path.read_text().splitlines())
    product = sum(count for package, count in lines.items() if package.split("/")[0] in ROOMS)
    circles = _circles(root, sources)
    loose = list((root / "flexq_bench").glob("*.py"))
    report = [
        *(f"{count:7,} {package}" for package, count in sorted(lines.items())),
        f"{product:7,} product, {lines['tests']:,} tests",
        f"{len(sources)} modules in {len({path.parent for path in sources})} packages",
        f"{len(loose)} loose files in flexq_bench",
        "longest parameter list: {} ({})".format(*_longest_parameters(sources)),
        f"{len(circles)} import circles",
        *(f"  {', '.join(circle)}" for circle in circles),
    ]
    sys.stdout.write("\n".join(report) + "\n")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def _package(path: Path) -> str:
    inner = path.parts[0] == "flexq_bench" and len(path.parts) > 2
    return "/".join(path.parts[:2]) if inner else path.parts[0]


def _longest_parameters(sources: dict[Path, ast.Module]) -> tuple[int, str]:
    functions = (
        (len(node.args.args) + len(node.args.kwonlyargs), f"{path.stem}.{node.name}")
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    )
    return max(functions)


def _circles(root: Path, sources: dict[Path, ast.Module]) -> list[list[str]]:
    names = {_module(root, path): path for path in sources}
    graph = networkx.DiGraph()
    for name, path in names.items():
        for imported in _imports(name, sources[path]):
            whole = imported if imported in names else imported.rpartition(".")[0]
            if whole in names and whole != name:
                graph.add_edge(name, whole)
    together = networkx.strongly_connected_components(graph)
    return [sorted(modules) for modules in together if len(modules) > 1]


def _module(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    has_links = (root / "flexq_bench" / "kernels").is_symlink()
    prefix = ("flexq_bench",) if has_links and parts[0] != "flexq_bench" else ()
    return ".".join((*prefix, *parts)).removesuffix(".__init__")


def _imports(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


if __name__ == "__main__":
    main()

"""Files of external kernels: what another machine needs to import a source."""

from __future__ import annotations

import importlib.util
import os
from modulefinder import ModuleFinder
from pathlib import Path

from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external.sources import SUFFIXES, KernelSource, top_of_package

MAX_BYTES = 256 << 20


def files_of_source(source: KernelSource) -> tuple[Path, list[Path]]:
    """Return a folder, and the files below it that a source needs besides installed packages.

    For a file: the modules and packages next to it that it imports, by a scan of its code, and the
    sources in other languages next to it; for a file in a package, or a module: its top-level
    package. None of the code is run. Raises SourceError if a file can't be read, or all are larger
    than MAX_BYTES.
    """
    source.check_exists()
    root, files = _of_file(Path(source.place)) if source.is_file else _of_module(source.place)
    size = sum(path.stat().st_size for path in files)
    if size > MAX_BYTES:
        raise SourceError(
            f"{source.place} has {size >> 20} MB of files, and {MAX_BYTES >> 20} MB are sent to a "
            "cluster at most: keep data out of the package, or install it on the nodes"
        )
    return root, files


def _of_file(path: Path) -> tuple[Path, list[Path]]:
    if (path.parent / "__init__.py").is_file():
        top = top_of_package(path)
        return top.parent, _below(top)
    folder = path.parent
    finder = ModuleFinder(path=[str(folder)])
    files = {path}
    try:
        finder.run_script(str(path))
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, OSError):
            raise SourceError(f"can't read {path}: {error.strerror}") from None
        return folder, [path]  # the import on the node reports it
    for name, module in finder.modules.items():
        file = getattr(module, "__file__", None)
        if file is None or "." in name or name == "__main__":
            continue
        module_file = Path(file)
        is_package = module_file.stem == "__init__"
        files.update(_below(module_file.parent) if is_package else [module_file])
    files.update(
        other
        for other in folder.iterdir()
        if other.suffix in SUFFIXES - {".py"} and other.is_file()
    )
    return folder, sorted(files)


def _of_module(name: str) -> tuple[Path, list[Path]]:
    spec = importlib.util.find_spec(name.partition(".")[0])
    assert spec is not None  # check_exists found it
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if folders:
        return folders[0].parent, _below(folders[0])
    if not spec.has_location or spec.origin is None:
        raise SourceError(f"{name} has no file that could be sent to a cluster")
    return Path(spec.origin).parent, [Path(spec.origin)]


def _below(folder: Path) -> list[Path]:
    return sorted(
        Path(place, name)
        for place, folders, names in os.walk(folder)
        if "__pycache__" not in Path(place).parts
        for name in names
    )

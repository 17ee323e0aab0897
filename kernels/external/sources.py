"""Sources of external kernels: their arguments, the names of their kernels, their hash."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from flexq_bench.kernels.errors import SourceError, first_line
from flexq_bench.kernels.external.external_code import importing

SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".hpp", ".so", ".toml", ".json"}
_HASH_DIGITS = 16
_PACKAGE = "__init__"  # the file of a package
_EXTERNAL = "flexq_bench_external_{}"  # names of modules loaded from files


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A Python file or a module with kernels.

    place: the file's absolute path, or the module's name. package: prefix of the names of its
    kernels; empty: that of the module's distribution, or the file's stem.
    """

    place: str
    package: str = ""

    @classmethod
    def parse(cls, text: str, package: str = "") -> KernelSource:
        """Parse `FILE.py` or `MODULE` from a command line."""
        is_file = text.endswith(".py") or os.sep in text
        return cls(str(Path(os.path.expanduser(text)).absolute()) if is_file else text, package)

    @property
    def is_file(self) -> bool:
        return os.sep in self.place

    @property
    def prefix(self) -> str:
        """Prefix of the names of its kernels, before the dot."""
        if self.package:
            return normalized(self.package)
        if self.is_file:
            path = Path(self.place)
            return normalized(path.parent.name if path.stem == _PACKAGE else path.stem)
        top = self.place.partition(".")[0]
        owners = metadata.packages_distributions().get(top) or [top]
        return normalized(owners[0])

    @property
    def argument(self) -> str:
        """Command-line argument that passes this source to a worker; `of_argument` parses it."""
        return f"{self.package}={self.place}"

    @classmethod
    def of_argument(cls, text: str) -> KernelSource:
        package, _, place = text.partition("=")
        return cls(place, package)

    def check_exists(self) -> None:
        """Raise SourceError if there is no such file or package; none of its code is run."""
        if self.is_file:
            if not os.path.isfile(self.place):
                raise SourceError(f"there is no file {self.place}: name a Python file or a module")
            if Path(self.place).suffix != ".py":
                raise SourceError(f"{self.place} is no Python file: its name must end in .py")
            return
        # Searching for more than the first part would import it.
        names = self.place.split(".")
        if not all(map(str.isidentifier, names)) or _no_module(names[0]):
            raise SourceError(
                f"there is no module {self.place!r} here: install it next to flexq-bench, or give "
                "the path of a .py file"
            )

    def imported(self) -> tuple[ModuleType, str]:
        """Import the source; return the module, and a hash of its sources.

        The sources are the file and the modules next to it, or in its package, that it imports; or
        all files of a package. Raises SourceError if there is none, and any exception of the
        import.
        """
        self.check_exists()
        if self.is_file:
            return self._imported_file()
        module = importlib.import_module(self.place)
        return module, hash_of_module(module)

    def _imported_file(self) -> tuple[ModuleType, str]:
        path = Path(self.place)
        folder, before = path.parent, set(sys.modules)
        sys.path.insert(0, str(folder))
        _find_own_package(path)
        try:
            module = _executed(_EXTERNAL.format(_identifier(path.stem)), path)
        except ImportError as error:
            if "no known parent package" not in str(error):
                raise
            if not (folder / f"{_PACKAGE}.py").is_file():
                raise SourceError(
                    f"{path} imports by a dot, and its folder is no package: put an __init__.py "
                    "into it"
                ) from error
            sys.path.remove(str(folder))
            folder = top_of_package(path)
            module = _imported_in_package(path, folder)
        imported = _files_of(sys.modules.keys() - before, top_of_package(path))
        return module, content_hash({path, *imported}, folder)


def top_of_package(path: Path) -> Path:
    """Return the folder of the outermost package that has a file, else the folder of the file."""
    top = path.parent
    while (top / f"{_PACKAGE}.py").is_file() and (top.parent / f"{_PACKAGE}.py").is_file():
        top = top.parent
    return top


def _find_own_package(path: Path) -> None:
    """Let a file in a package import from it by its full name, before installed packages."""
    folder = str(top_of_package(path).parent)
    is_package = (path.parent / f"{_PACKAGE}.py").is_file()
    if is_package and folder not in sys.path:
        sys.path.insert(1, folder)


def _imported_in_package(path: Path, top: Path) -> ModuleType:
    """Import a file as a module of its package, so that relative imports work."""
    inside = path.relative_to(top).with_suffix("").parts
    parts = inside[:-1] if inside[-1] == _PACKAGE else inside
    sys.path.insert(0, str(top.parent))
    with suppress(ImportError):
        module = importlib.import_module(".".join((top.name, *parts)))
        if Path(str(module.__file__)).samefile(path):
            return module
    # Another package of this name was imported before: use a unique one.
    package = _executed(
        _EXTERNAL.format(f"package_{_identifier(top.name)}"), top / f"{_PACKAGE}.py"
    )
    return importlib.import_module(".".join((package.__name__, *parts)))


def _executed(name: str, path: Path) -> ModuleType:
    folders = [str(path.parent)] if path.stem == _PACKAGE else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None  # noqa: PT018  it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle, Triton and dataclasses search for it
    spec.loader.exec_module(module)
    return module


def _identifier(name: str) -> str:
    return normalized(name).replace("-", "_")


def _no_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ValueError:  # an initial module, which has no spec
        return True
    except ImportError as error:  # raised by a finder, with more information
        raise SourceError(first_line(error)) from error


def normalized(name: str) -> str:
    """Return a normalized package name: lower case letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "kernels"


def hash_of_module(module: ModuleType) -> str:
    """Return a hash of all sources of a module's top-level package."""
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    folders = [Path(folder) for folder in getattr(top, "__path__", ())]
    if folders:
        return hash_of_folders(folders)
    file = getattr(module, "__file__", None)
    return content_hash({Path(file)}, Path(file).parent) if file else ""


def hash_of_folders(folders: Sequence[Path]) -> str:
    """Return a hash of all sources in folders."""
    paths = {p for folder in folders for p in folder.rglob("*") if p.suffix in SUFFIXES}
    return content_hash(paths, folders[0])


def content_hash(paths: Iterable[Path], root: Path) -> str:
    """Return a hash, in hexadecimal digits, of the names in a folder and contents of files."""
    digest = hashlib.sha256()
    for path in sorted(set(paths)):
        name = os.path.relpath(path, root)
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:_HASH_DIGITS]


def _files_of(modules: Iterable[str], folder: Path) -> Iterator[Path]:
    for name in modules:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            continue
        path = Path(file)
        # There may be a virtual environment next to the file.
        if path.is_relative_to(folder) and "site-packages" not in path.parts and path.is_file():
            yield path


@contextmanager
def guarded_import(what: str) -> Iterator[None]:
    """Convert any exception of the import of external code, also an exit, to a SourceError."""
    exit_now, importer = os._exit, os.getpid()

    def refuse_exit(code: int) -> None:
        # a child that the import forked, for example by multiprocessing
        if os.getpid() != importer:
            exit_now(code)
        raise SystemExit(code)

    os._exit = refuse_exit  # type: ignore[assignment]  # its type says that it never returns
    try:
        with importing():
            yield
    except (SourceError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        code = "" if error.code is None else f": {first_line(error)}"
        raise SourceError(f"{what} ends the process when it is imported{code}") from error
    except BaseException as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise SourceError(f"{what} does not import: {reason}") from error
    finally:
        os._exit = exit_now

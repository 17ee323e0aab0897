"""Collect the texts that ship with the accuracy gate into flexq_bench/accuracy/strata/.

    python benchmarks/accuracy/collect_strata.py flexq_bench/accuracy/strata

| file | from | licence |
| --- | --- | --- |
| general.txt | comments of sqlite3.h, docstrings of the standard library | public domain, PSF |
| code.txt | sources of the standard library, without their docstrings | PSF |
| language.txt | manual page of xz in German, French, Ukrainian and Korean | public domain |

Documents are separated by a line with a form feed. Needs libsqlite3-dev, manpages of xz-utils in
these languages, and Python 3.11; other versions give other texts.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

BYTES = 150_000  # of each file, at most
PACKAGES = ("asyncio", "email", "importlib", "unittest", "json", "concurrent", "multiprocessing",
            "logging", "http", "xml", "collections", "urllib")  # fmt: skip
LANGUAGES = ("de", "fr", "uk", "ko")
SQLITE = Path("/usr/include/sqlite3.h")
MANUALS = Path("/usr/share/man")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    prose = [
        *_spread(list(sqlite_comments()), BYTES // 2),
        *_spread(list(docstrings()), BYTES // 2),
    ]
    code = _spread(list(sources()), BYTES)
    pages = [page[: BYTES // len(LANGUAGES)] for page in manuals()]
    for name, documents in (("general", prose), ("code", code), ("language", pages)):
        text = "\n\f\n".join(document.strip("\n") for document in documents) + "\n"
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


def _spread(documents: list[str], most: int) -> list[str]:
    """Every k-th document, with the least k that keeps to a size in bytes."""
    for step in range(1, len(documents) + 1):
        kept = documents[::step]
        if sum(len(document.encode()) for document in kept) <= most:
            return kept
    return documents[:1]


def sqlite_comments() -> Iterator[str]:
    """Descriptions of SQLite's C interface, without its markup."""
    for comment in re.findall(r"/\*\n(\*\*.*?)\*/", SQLITE.read_text(encoding="utf-8"), re.S):
        lines = [re.sub(r"^\*\* ?", "", line) for line in comment.splitlines()]
        text = re.sub(r"</?[a-z]+[^>]*>|\^\(?|\)\^|\[\[|\]\]", "", "\n".join(lines))
        if len(text) > 400:
            yield text


def _modules() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for package in PACKAGES:
        for path in sorted((library / package).rglob("*.py")):
            if "test" not in path.parts:
                yield path.read_text(encoding="utf-8")


def docstrings() -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for source in _modules():
        for node in ast.walk(ast.parse(source)):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and len(text) > 400:
                yield text


def sources() -> Iterator[str]:
    """Definitions of at least 40 lines at the top of a module."""
    for source in _modules():
        lines = source.splitlines()
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                end = node.end_lineno or node.lineno
                documented = ast.get_docstring(node) is not None
                first = node.body[0].end_lineno if documented else node.lineno
                kept = lines[node.lineno - 1 : node.lineno] + lines[first or 0 : end]
                if 40 <= len(kept) <= 200:
                    yield "\n".join(kept)


def manuals() -> Iterator[str]:
    """Manual pages of xz without their markup."""
    for language in LANGUAGES:
        page = gzip.decompress((MANUALS / language / "man1" / "xz.1.gz").read_bytes()).decode()
        lines = []
        for line in page.splitlines():
            if line.startswith(('.\\"', "'\\\"", ".TH")):
                continue
            line = re.sub(r"^\.(SH|SS|TP|IP|B|I|BR|IR|RI|BI) ?", "", line)
            if line.startswith("."):
                continue
            line = re.sub(r"\\f(\[[A-Z]*\]|\(..|[A-Z])|\\&", "", line)
            line = re.sub(r"\\(-|e|\(em|\(bu|%|:)", "-", line).replace("\\", "").replace('"', "")
            lines.append(line)
        yield re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


if __name__ == "__main__":
    main()

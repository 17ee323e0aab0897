"""Hash of a source in kernels/csrc and of the files that it includes."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def source_hash(folder: Path, source: str) -> str:
    """SHA-256 over a source in `folder` and the files there that it includes, even conditionally.

    Equal hashes, defines, options and compilers give equal machine code. Raises OSError if the
    source is missing.
    """
    texts = included_files(folder, source)
    digest = hashlib.sha256()
    for name in sorted(texts):
        content = texts[name]
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def included_files(folder: Path, source: str) -> dict[str, bytes]:
    """Contents of a source in `folder` and of the files there that it includes, by path.

    Raises OSError if the source is missing.
    """
    texts: dict[str, bytes] = {}
    _read(folder, source, texts)
    return texts


def _read(folder: Path, name: str, texts: dict[str, bytes]) -> None:
    texts[name] = (folder / name).read_bytes()
    for included in _INCLUDE.findall(texts[name].decode(errors="replace")):
        # The compiler reports a missing header with its line.
        if included not in texts and (folder / included).is_file():
            _read(folder, included, texts)

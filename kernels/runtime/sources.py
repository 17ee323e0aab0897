"""Hash of a source in kernels/csrc and of the files that it includes."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path

from flexq_bench.kernels.runtime.files import read_regular

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
    texts = {source: read_regular(folder / source)}
    waiting = [source]
    while waiting:
        for included in _INCLUDE.findall(texts[waiting.pop()].decode(errors="replace")):
            # The compiler reports a missing header with its line.
            with suppress(OSError, ValueError):
                if included not in texts:
                    texts[included] = read_regular(folder / included)
                    waiting.append(included)
    return texts

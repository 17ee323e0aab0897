"""This program as the processes of other repositories' kernels import it."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import flexq_bench
from flexq_bench.kernels.runtime.files import cache_folder
from flexq_bench.packages import PACKAGE


def program_root(packages: Path | None = None) -> Path:
    """A folder with a link to the package of this process, and nothing else.

    packages: the folder that contains the package; None: that of this file. It comes first on a
    worker's path, and must not hide packages that a project has, or has installed.
    """
    root = packages or Path(flexq_bench.__file__).resolve().parents[1]
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:16]
    links = cache_folder() / "program" / digest
    links.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        (links / PACKAGE).symlink_to(root / PACKAGE)
    return links

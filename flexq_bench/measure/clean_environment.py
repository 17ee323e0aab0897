"""The environment of a process that runs unreviewed code: no secrets, and a private cache."""

from __future__ import annotations

import fnmatch
import os
import site
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flexq_bench.kernels.runtime.files import temporary_folder

# Names or patterns. Other variables are not passed on, because a token may have any name.
_PASSED = (
    "PATH",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "TZ",
    "LD_LIBRARY_PATH",
    "CUDA_*",
    "NVIDIA_*",
    "OMP_NUM_THREADS",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "VIRTUAL_ENV",
)


@contextmanager
def clean_environment() -> Iterator[dict[str, str]]:
    """Variables for the processes of one run, with HOME, TMPDIR and the cache in a temporary
    folder.
    """
    with temporary_folder() as home:
        own = {"HOME": home, "TMPDIR": home / "tmp", "FLEXQ_BENCH_CACHE": home / "cache"}
        for folder in own.values():
            folder.mkdir(exist_ok=True)
        installed = os.pathsep.join(installed_on_python_path())
        yield {
            **{name: value for name, value in os.environ.items() if is_passed(name)},
            **{name: str(folder) for name, folder in own.items()},
            # Packages that were installed for the user are in the real home.
            "PYTHONUSERBASE": site.getuserbase(),
            **({"PYTHONPATH": installed} if installed else {}),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Libraries ask for the name of their user, who in a sandbox is in no list.
            **dict.fromkeys(("USER", "LOGNAME"), "flexq-bench"),
        }


def installed_on_python_path() -> list[str]:
    """Return the folders of PYTHONPATH into which packages were installed (`pip --target`).

    Others are left out: they may have modules of the code under test, or in place of it.
    """
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [name for name in folders if name and any(Path(name).glob("*.dist-info"))]


def is_passed(name: str) -> bool:
    """Return True if unreviewed code may know a variable of this name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _PASSED)

"""Checks of a machine: installed and missing software, with advice."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from typing import Literal

from flexq_bench.db.engine import open_database, revision_of
from flexq_bench.db.errors import DatabaseError, MissingDatabaseError
from flexq_bench.kernels.errors import UnsupportedError
from flexq_bench.kernels.external_packages.packages import PACKAGES, Package, check
from flexq_bench.kernels.runtime.machine_code import check_tools
from flexq_bench.packages import EXTRAS, install_extra, missing_modules
from flexq_bench.repository.provenance import current_commit, package_version

State = Literal["ok", "missing", "broken"]
_PIP = "pip install flexq-bench"
_SUPPORTED_PYTHON = ((3, 11), (3, 14))


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. state: missing if optional, broken if required.

    advice: what to do; empty: nothing.
    """

    name: str
    state: State
    detail: str
    advice: str = ""


def examine(db: str | None) -> list[Check]:
    """Run every check, without side effects and exceptions."""
    driver = _driver()
    has_gpu = driver.state == "ok"
    extra = "cuda12" if "CUDA 12." in driver.detail else "cuda13"
    return [
        _python(),
        Check("flexq-bench", "ok", package_version()),
        _module("torch", "torch", required=True, show=_torch),
        driver,
        *_gpus(has_gpu),
        _for_gpu("cupy", "cupy", extra, has_gpu),
        _for_gpu("nvrtc", "cuda.bindings.nvrtc", extra, has_gpu),
        _for_gpu("nvmath", "nvmath", extra, has_gpu),
        *(_peer(package) for package in PACKAGES),
        *(_extra(name) for name in EXTRAS if not name.startswith("cuda") or name == extra),
        _database(db),
        _tree(),
        _git(),
    ]


def _python() -> Check:
    low, high = _SUPPORTED_PYTHON
    version = platform.python_version()
    if low <= sys.version_info[:2] < high:
        return Check("python", "ok", f"{version} ({sys.executable})")
    return Check("python", "broken", version, "install Python 3.11 to 3.13")


def _torch() -> str:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return f"{torch.__version__}, {built}"


def _driver() -> Check:
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return Check("CUDA driver", "missing", "nvidia-ml-py is not installed", _PIP)
    except pynvml.NVMLError as error:
        advice = "for GPUs, install an NVIDIA driver; the CPU works"
        return Check("CUDA driver", "missing", f"{error}", advice)
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Check("CUDA driver", "ok", f"{driver}, CUDA {cuda // 1000}.{cuda % 1000 // 10}")
    except pynvml.NVMLError as error:
        return Check("CUDA driver", "missing", f"{error}", "install the NVIDIA driver again")
    finally:
        pynvml.nvmlShutdown()


def _gpus(has_driver: bool) -> list[Check]:
    if not has_driver:
        return [Check("GPU", "missing", "none", "kernels run on the CPU backend instead")]
    import torch

    if not torch.cuda.is_available():
        return [
            Check(
                "GPU",
                "missing",
                "torch can't use it",
                "install a torch built for CUDA no newer than the driver's",
            )
        ]
    checks = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        detail = (
            f"{properties.name}, capability {properties.major}.{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
        enough = (properties.major, properties.minor) >= (8, 0)
        checks.append(
            Check(f"cuda:{i}", "ok", detail)
            if enough
            else Check(f"cuda:{i}", "missing", detail, "our kernels need capability 8.0")
        )
    return checks


def _for_gpu(name: str, module: str, extra: str, has_gpu: bool) -> Check:
    install = install_extra(extra)
    advice = install if has_gpu else f"only GPUs need it: {install}"
    return _module(name, module, required=False, advice=advice)


def _peer(package: Package) -> Check:
    """Check a package of baseline kernels without importing it."""
    try:
        check(package)
    except UnsupportedError as error:
        return Check(package.name, "missing", f"{error}".partition(":")[0], install_extra("peers"))
    return Check(package.name, "ok", _version(package.module))


def _extra(name: str) -> Check:
    """Check that the packages of an extra are installed, without importing them."""
    missing = ", ".join(missing_modules(name))
    if not missing and name == "static":
        try:
            check_tools()
        except UnsupportedError as error:
            missing = f"{error}".partition(":")[0]
    if missing:
        return Check(f"extra {name}", "missing", f"without {missing}", install_extra(name))
    return Check(f"extra {name}", "ok", ", ".join(map(_version, EXTRAS[name])))


def _module(
    name: str,
    module: str,
    *,
    required: bool,
    advice: str | None = None,
    show: Callable[[], str] | None = None,
) -> Check:
    """Check that a module is installed.

    show: imports and describes it. required: by every use of the program.
    """
    state: State = "broken" if required else "missing"
    hint = advice or _PIP
    try:
        if util.find_spec(module) is None:
            return Check(name, state, "not installed", hint)
        return Check(name, "ok", show() if show else _version(module))
    except Exception as error:  # a broken installation may raise anything
        return Check(name, state, f"{type(error).__name__}: {error}".splitlines()[0], hint)


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()  # reads every installed package: a third of a second


def _version(module: str) -> str:
    owners = _distributions().get(module.partition(".")[0], [])
    versions = [f"{name} {metadata.version(name)}" for name in dict.fromkeys(owners)]
    return ", ".join(versions) or "found"


def _database(db: str | None) -> Check:
    try:
        with open_database(db, read_only=True) as database:
            return Check("database", "ok", f"{database.url}, revision {revision_of(database)}")
    except MissingDatabaseError as error:
        return Check("database", "ok", f"{error}")
    except DatabaseError as error:
        return Check("database", "broken", f"{error}", "name another one with --db")


def _tree() -> Check:
    commit = current_commit()
    if commit.sha.startswith("pkg-"):
        return Check("code", "ok", f"{commit.sha}, not a git tree")
    changed = "; has changes: its results never become a baseline" if commit.dirty else ""
    return Check("code", "ok", f"{commit.sha[:10]} {commit.subject}{changed}")


def _git() -> Check:
    path = shutil.which("git")
    if path is None:
        advice = "results are then not tied to a commit: install git"
        return Check("git", "missing", "not found on PATH", advice)
    return Check("git", "ok", path)

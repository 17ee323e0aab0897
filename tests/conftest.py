"""Fixtures of several rooms: a database, git, commits and comparisons that are made up."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

# Read when ray is imported, by whichever test comes first: clusters here stay on the loopback (see
# flexq_bench.fleet.ray_cluster).
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
# Tensors here are small: threads would wait for those of the tests beside these.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as of the program, also for its processes
# Tests beside these measure on the same CPU, and need not wait for each other.
# Most tests of external kernels have them write beside their file, and start many of them.
os.environ["FLEXQ_BENCH_SANDBOX"] = "none"
os.environ["FLEXQ_BENCH_LOCKS"] = tempfile.mkdtemp(prefix="flexq-locks-")
atexit.register(shutil.rmtree, os.environ["FLEXQ_BENCH_LOCKS"], ignore_errors=True)

# What tests import stays: it is never collected, also not while it is imported.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect the garbage of tests from now on."""
    gc.freeze()
    gc.enable()


# Rooms whose tests run over grids of models, schemes and formats.
OF_GRIDS = {"accuracy", "checkpoints", "decode", "kernels", "schemes"}
FAST_CASES = 2


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their parameter: packed ones differ by the time at which they were packed."""
    return argname if isinstance(val, bytes) and len(val) > 16 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave two cases of a grid, drawn by their names, among the fast tests."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in OF_GRIDS:
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in grids.values():
        fast = [case for case in cases if not case.get_closest_marker("slow")]
        for case in sorted(fast, key=lambda case: zlib.crc32(case.nodeid.encode()))[FAST_CASES:]:
            case.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """load_module(path): a file as a module, named like it with its folder."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def build(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Builders of what a database holds: build.a_record(m=8), build.a_run(), build.a_commit(3)."""
    return load_module(Path(__file__).parent / "db" / "builders.py")


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], object]], None]:
    """eventually(condition): waits until it holds, as after a signal; fails after a minute."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it never holds"
            time.sleep(0.01)

    return wait


# The variables by which a CI job names the branch that it measures.
OF_CI = ("GITHUB_HEAD_REF", "GITHUB_REF", "CI_COMMIT_BRANCH", "CI_DEFAULT_BRANCH")


@pytest.fixture(autouse=True)
def outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable says that this is a CI job."""
    for name in OF_CI:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session", autouse=True)
def quick_protocol() -> Iterator[None]:
    """Cases on a CPU are measured in a tenth of the time: with fewer samples, after less warm-up.

    In this process; others that measure take the usual protocol.
    """
    if "torch" not in sys.modules:  # no collected test measures
        yield
        return
    from flexq_bench.measure import meter
    from flexq_bench.runs import worker

    usual = meter.PROTOCOL_CPU
    short = {"min_s": 0.001, "max_s": 0.005}
    quick = replace(
        usual,
        warm_up=replace(usual.warm_up, **short),
        rewarm=replace(usual.rewarm, **short),
        min_device_s=0.01,
        max_overhead=20.0,  # messages take as long as before, beside shorter turns
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (meter, worker):
            patch.setattr(module, "PROTOCOL_CPU", quick)
        yield


@pytest.fixture(scope="session", autouse=True)
def shared_fork_server() -> Iterator[None]:
    """Forks the processes of modules of ours that have no sandbox; it imports torch once.

    A process that the server can't make like a new one is a new one: with another environment, or
    of another program. Tests of launchers make their own.
    """
    if "torch" not in sys.modules:  # no collected test starts such processes
        yield
        return
    from flexq_bench.measure import external_kernels, kernel_processes, worker_process
    from flexq_bench.measure.ab import projects
    from flexq_bench.measure.launcher import ForkServer, FreshProcesses, Launcher, Process

    variables = {name: value for name, value in os.environ.items() if name not in OF_CI}
    variables.pop("FLEXQ_BENCH_DB", None)

    class Shared(ForkServer):
        has_begun = False

        def start(self, command: Sequence[str], **options: Any) -> Process:
            if command[1] != "-m":
                return FreshProcesses().start(command, **options)
            if not self.has_begun:
                self.begin(command[2], variables)
                self.has_begun = True
            return super().start(command, **options)

    def unless_wrapped(wrap: Callable[..., Sequence[str]] = tuple) -> Launcher:
        return server if list(wrap(["python"])) == ["python"] else FreshProcesses(wrap)

    with Shared() as server, pytest.MonkeyPatch.context() as patch:
        for module in (external_kernels, worker_process, projects):
            patch.setattr(module, "FreshProcesses", unless_wrapped)
        patch.setattr(kernel_processes, "forking_launcher", lambda _program: nullcontext(server))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_tables() -> Iterator[Callable[..., Any]]:
    """New SQLite databases in this process are copies of one that the migrations made.

    None waits for the disk. The value is what makes tables otherwise: `db.schema.migrate`.
    """
    import sqlite3

    from sqlalchemy import create_engine
    from sqlalchemy.pool import StaticPool

    from flexq_bench.db import engine as engines
    from flexq_bench.db import schema

    migrate, use_log, filling = schema.migrate, engines._use_write_ahead_log, threading.Lock()

    @cache
    def migrated() -> sqlite3.Connection:
        made = sqlite3.connect(":memory:", check_same_thread=False)
        with create_engine("sqlite://", creator=lambda: made, poolclass=StaticPool).begin() as new:
            migrate(new)
        return made

    def unless_done(connection: Any) -> schema.Upgrade:
        revision, newest = schema.current_revision(connection), schema.revisions()[-1]
        return schema.Upgrade(newest, newest) if revision == newest else migrate(connection)

    def use_log_and_fill(database: engines.Database) -> None:
        use_log(database)
        with filling:
            if schema.migrate is unless_done and engines.revision_of(database) is None:
                with database.engine.connect() as connection:
                    file: Any = connection.connection.driver_connection
                    migrated().backup(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "migrate", unless_done)
        patch.setattr(engines, "_use_write_ahead_log", use_log_and_fill)
        patch.setattr(engines, "_SYNCHRONOUS", "OFF")
        yield migrate
    if migrated.cache_info().currsize:
        migrated().close()


@pytest.fixture(scope="session", autouse=True)
def statements_compiled_once() -> Iterator[None]:
    """SQLAlchemy compiles a statement once for all SQLite databases of this process.

    As for one database: its cache is of an engine, whose dialect is part of each key.
    """
    from weakref import WeakKeyDictionary

    from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite as Dialect
    from sqlalchemy.util import LRUCache

    from flexq_bench.db import engine as engines

    make, compiled, types = engines._sqlite_engine, LRUCache(4000), WeakKeyDictionary()

    def sharing(*arguments: Any, **options: Any) -> Any:
        engine = make(*arguments, **options)
        engine._compiled_cache, engine.dialect._type_memos = compiled, types
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "_sqlite_engine", sharing)
        patch.setattr(Dialect, "__eq__", lambda one, other: type(one) is type(other))
        patch.setattr(Dialect, "__hash__", lambda one: hash(type(one)))
        yield


@pytest.fixture(scope="session", autouse=True)
def no_history_of_this_checkout() -> Iterator[None]:
    """Runs in tests do not store the thousands of commits of this repository."""
    from flexq_bench.repository import provenance

    class Others(dict[str, Path]):
        def __setitem__(self, sha: str, root: Path) -> None:
            if root != Path(__file__).parents[1]:
                super().__setitem__(sha, root)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "_clones", Others())
        yield


@pytest.fixture(scope="session")
def one_scan_for_components() -> Iterator[None]:
    """Streamlit reads the metadata of all installed packages once, not at every run of a page."""
    from streamlit.components.v2 import manifest_scanner

    with pytest.MonkeyPatch.context() as patch:
        scan = cache(manifest_scanner.scan_component_manifests)
        patch.setattr(manifest_scanner, "scan_component_manifests", scan)
        yield


@pytest.fixture(scope="session")
def toolchain() -> None:
    """Skips where this machine can't compile and disassemble."""
    from flexq_bench.kernels.errors import KernelError
    from flexq_bench.kernels.runtime.machine_code import resources
    from flexq_bench.kernels.runtime.nvrtc import Build, compile_build

    try:
        resources(compile_build(Build.of("cublas/rows.cu"), "sm_90"))
    except KernelError as error:
        pytest.skip(str(error))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Any]:
    """A new SQLite database with our tables, open."""
    from flexq_bench.db.engine import open_database

    with open_database(str(tmp_path / "flexq.sqlite")) as opened:
        yield opened


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., SimpleNamespace]:
    """The command line in this process, with a database of the test's own."""
    from flexq_bench.cli.app import main

    monkeypatch.setenv("FLEXQ_BENCH_DB", str(tmp_path / "flexq.sqlite"))

    def run(*arguments: str) -> SimpleNamespace:
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, error=captured.err)

    return run


@pytest.fixture(scope="session")
def llama_config() -> Callable[..., Any]:
    """llama_config(hidden, ffn, vocabulary, …): 2 blocks, 4 heads on 2 key-value heads."""
    from transformers import LlamaConfig

    def build(hidden: int, ffn: int, vocabulary: int, **others: Any) -> LlamaConfig:
        sizes = {"hidden_size": hidden, "intermediate_size": ffn, "vocab_size": vocabulary}
        usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaConfig(**{**sizes, **usual, "max_position_embeddings": 64, **others})

    return build


@pytest.fixture(scope="session")
def git() -> Callable[..., str]:
    """git(folder, "commit", …): stdout of git there, stripped. Commits have a made-up author."""

    def run(folder: Path, *arguments: str) -> str:
        identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
        command = ["git", "-C", str(folder), *identity, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    return run


def _sha(order: int) -> str:
    return f"{order:040x}"


@pytest.fixture(scope="session")
def sha() -> Callable[[int], str]:
    """The id of the commit with this place in the ancestry."""
    return _sha


@pytest.fixture(scope="session")
def commits() -> dict[str, Any]:
    """Thirty commits on one line, by id."""
    from flexq_bench.db.records import CommitInfo

    return {
        _sha(order): CommitInfo(
            sha=_sha(order),
            parent=_sha(order - 1),
            topo_order=order,
            dirty=False,
            subject=f"Change {order}",
            author="Ada",
        )
        for order in range(1, 31)
    }


@pytest.fixture(scope="session")
def compared() -> Callable[..., Any]:
    """compared("flexq-w6a6", 1.05): a comparison where the head takes 1.05 times as long.

    base, head: places in the ancestry. noise: sigma (ln) of a placement; drawn by case and commits.
    Other fields are those of CaseComparison and Comparison.
    """
    import numpy as np

    from flexq_bench.verdicts import CaseComparison, Comparison, confirm
    from flexq_bench.workloads.case import Case
    from flexq_bench.workloads.gemm import GemmWorkload

    def make(
        kernel: str = "flexq-w6a6",
        ratio: float = 1.0,
        *,
        base: int = 1,
        head: int = 2,
        shape: tuple[int, int, int] = (1, 256, 256),
        noise: float = 0.0005,
        placements: int = 6,
        cache: str = "cold",
        **changes: Any,
    ) -> CaseComparison:
        case = Case(kernel, GemmWorkload(*shape), cache=cache)
        seed = zlib.crc32(f"{case.key} {ratio} {base} {head} {changes.get('seed')}".encode())
        rng = np.random.default_rng(seed)
        labels = np.repeat(np.arange(placements), 2)
        offsets = rng.normal(math.log(ratio), noise, placements)[labels]
        scatter = rng.normal(0, noise / 4, labels.size)
        comparison = Comparison(
            base_us=tuple(float(v) for v in np.full(labels.size, 10.0)),
            head_us=tuple(float(v) for v in 10.0 * np.exp(offsets + scatter)),
            placement=tuple(int(v) for v in labels),
            correct=changes.get("correct", True),
            base_correct=changes.get("base_correct", True),
            same_binary=changes.get("same_binary", False),
            same_code=changes.get("same_code", False),
        )
        return CaseComparison(
            case,
            _sha(base),
            _sha(head),
            comparison,
            confirm(comparison),
            base_binary="one",
            head_binary="one" if comparison.same_binary else "other",
            base_config={"block_n": 64},
            head_config={"block_n": 128},
            detail=changes.get("detail", ""),
        )

    return make

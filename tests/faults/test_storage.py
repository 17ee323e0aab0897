"""Full disks, folders that become read-only, and a server whose standby takes over."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, text

from flexq_bench.cli.app import main
from flexq_bench.db import schema
from flexq_bench.db.engine import Database, open_database, revision_of, upgrade
from flexq_bench.exit_codes import ExitCode
from tests.faults.conftest import (
    OURS,
    Bench,
    Launcher,
    Server,
    database_on_small_disk,
    fill_disk,
)
from tests.faults.proxy import Proxy
from tests.faults.test_every_option import PROGRESS
from tests.faults.test_faults import in_a_file, on_a_server, under_way

pytestmark = pytest.mark.timeout(180)


def test_disk_full(bench: Bench, kind: str, request: pytest.FixtureRequest) -> None:
    """SQLite ends the run in good order; a server's clients wait until there is space."""
    with database_on_small_disk(kind, request, 32 if kind == "postgresql" else 8) as (url, disk):
        bench.url, bench.direct, bench.cases = url, url, 200
        with open_database(url, check_schema=False) as database:
            upgrade(database)
        pid, log = under_way(bench, seconds=0.005)
        filler = fill_disk(disk)
        if kind == "postgresql":
            bench.until(lambda: "disk is full" in log.read_text() or "done" in log.read_text())
            filler.unlink()
        code = bench.wait(pid)
        filler.unlink(missing_ok=True)
        # It may have been at its end.
        expected = {ExitCode.PASS} | ({ExitCode.INFRASTRUCTURE} if kind == "sqlite" else set())
        assert code in expected, bench.said()
        assert code == ExitCode.PASS or "the disk is full" in bench.said()
        bench.finish()
        bench.check()


def rows_of(database: Database) -> list[tuple[object, ...]]:
    with database.engine.connect() as connection:
        return [
            (name, *connection.execute(text(f"SELECT count(*), min(id) FROM {name}")).one())
            for name in ("device", "environment")
        ]


def old_database(url: str) -> Database:
    """Tables of the first revision, with rows that a migration copies."""
    # Not by open_database: it gives an empty file the tables of the newest revision.
    shown = url if "://" in url else f"sqlite:///{url}"
    engine = create_engine(shown.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        command.upgrade(schema.alembic_config(connection), schema.revisions()[0])
    engine.dispose()
    return open_database(url, check_schema=False)


def test_disk_full_in_a_migration(
    kind: str, round_seed: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing changes, and the same command goes on when there is space."""
    chance = random.Random(f"migration {round_seed}")
    with (
        database_on_small_disk(kind, request, 32 if kind == "postgresql" else 8) as (url, disk),
        old_database(url) as database,
    ):
        before, rows = revision_of(database), rows_of(database)
        assert before == schema.revisions()[0]
        filler = fill_disk(disk, leave=chance.randrange(0, 200_000, 4096))

        code = main(["db", "upgrade", "--db", url])

        said = capsys.readouterr().err
        assert code == ExitCode.INFRASTRUCTURE, said
        assert "the disk is full" in said or "server's disk is full" in said
        lines = [line for line in said.splitlines() if not PROGRESS.search(line)]
        assert len(lines) == 1, said
        filler.unlink()
        assert (revision_of(database), rows_of(database)) == (before, rows)
        assert main(["db", "upgrade", "--db", url]) == ExitCode.PASS
        assert revision_of(database) == schema.revisions()[-1]
        assert rows_of(database) == rows


@on_a_server
def test_standby_takes_over(bench: Bench, server: Server) -> None:
    """The primary is lost at once; what it acknowledged is on the standby."""
    with server.standby() as primary:
        primary.promote()  # a server of this round's own
        server.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        with primary.standby() as standby:
            proxy = Proxy(primary.socket)
            bench.url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{OURS}"
            pid, _ = under_way(bench)
            primary.stop_at_once()
            time.sleep(random.Random(bench.seed).uniform(0.2, 3))
            standby.promote()
            proxy.server = standby.socket
            proxy.cut()

            bench.direct = standby.url(OURS)
            assert bench.wait(pid) == ExitCode.PASS, bench.said()
            bench.check()
            proxy.close()


@pytest.fixture(scope="session")
def owner_without_privileges() -> Iterator[Launcher]:
    """Root obeys permissions without this capability."""
    before = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search")
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("no setpriv, without which root may write anywhere")
    warm = Launcher(*(before if os.geteuid() == 0 else ()))
    yield warm
    warm.close()


@in_a_file
@pytest.mark.parametrize("what", ["folder", "file"])
def test_storage_becomes_read_only(
    bench: Bench, what: str, owner_without_privileges: Launcher
) -> None:
    """Who has opened the file goes on or ends in good order; who opens it is refused in a line."""
    path = Path(bench.direct)
    locked = path.parent if what == "folder" else path
    first, _ = under_way(bench, owner_without_privileges)
    mode = locked.stat().st_mode
    locked.chmod(mode & ~0o222)
    try:
        log = path.parent.parent / f"{bench.run}.log"
        refused = owner_without_privileges.start(bench.order(log=str(log)))
        assert bench.wait(refused, owner_without_privileges) == ExitCode.INFRASTRUCTURE
        assert "read-only" in log.read_text()
        assert "unexpected" not in log.read_text()
    finally:
        locked.chmod(mode)

    code = bench.wait(first, owner_without_privileges)
    assert code in (ExitCode.PASS, ExitCode.INFRASTRUCTURE), bench.said()
    bench.finish()
    bench.check()

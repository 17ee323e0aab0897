"""Kills, outages and bad neighbours: no result is lost, none doubled, no run left for ever.

`make test-faults`; FAULT_ROUNDS=20 runs twenty seeded rounds of each on both databases.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexq_bench.db.engine import BUSY_TIMEOUT_S, open_database
from flexq_bench.db.exchange import import_file, read_records
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import INTERRUPTED, ExitCode
from flexq_bench.runs.resume import read_unfinished
from tests.faults.conftest import OURS, Bench, Launcher
from tests.faults.fleet_process import COMMIT, TIMES
from tests.faults.proxy import Proxy

pytestmark = pytest.mark.timeout(180)
on_a_server = pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
in_a_file = pytest.mark.parametrize("kind", ["sqlite"], indirect=True)


def some(bench: Bench, low: int = 3, high: int = 30) -> int:
    """Draw the number of results stored before the fault, by the round's seed."""
    return random.Random(f"{bench.fault} {bench.seed}").randint(low, high)


def under_way(
    bench: Bench, launcher: Launcher | None = None, **changes: object
) -> tuple[int, Path]:
    pid, log = bench.start(launcher, **changes)
    bench.until_stored(some(bench), log)
    return pid, log


def test_workers_die_and_hang(bench):
    pid, _ = bench.start(deaths=0.15, hangs=0.02)

    assert bench.wait(pid) == ExitCode.PASS
    bench.check()


def test_coordinator_killed(bench):
    for _ in range(2):
        pid, _ = under_way(bench)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert bench.wait(pid) in (-signal.SIGKILL, ExitCode.PASS)
    bench.finish()

    bench.check()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_coordinator_stopped(bench, number):
    pid, _ = under_way(bench)
    os.kill(pid, number)

    code = bench.wait(pid)
    assert code == INTERRUPTED or (code == ExitCode.PASS and "done" in bench.said())
    bench.finish()
    bench.check()


def test_two_coordinators_of_one_run(bench):
    # The fault is company, not an outage: on a busy machine a second is short for taking turns.
    first, second = (bench.start(busy_s=BUSY_TIMEOUT_S) for _ in range(2))

    codes = {bench.wait(first[0]), bench.wait(second[0])}
    assert codes == {ExitCode.PASS}, bench.said()
    bench.check()


def test_two_coordinators_one_killed(bench):
    first, second = under_way(bench), bench.start(busy_s=BUSY_TIMEOUT_S)
    with suppress(ProcessLookupError):
        os.kill(first[0], signal.SIGKILL)

    bench.wait(first[0])
    assert bench.wait(second[0]) == ExitCode.PASS
    bench.check()


def test_records_that_cannot_be_stored(bench):
    pid, _ = bench.start(poison=7)

    assert bench.wait(pid) == ExitCode.PASS
    bench.check(has_failed=bench.cases // 7)


def test_resume_while_a_fleet_is_live(bench):
    # So slow that the run is not over when it is looked at, and stopped, so that it stays so.
    pid, _ = under_way(bench, seconds=0.2)
    os.kill(pid, signal.SIGSTOP)
    said = []
    try:
        with open_database(bench.direct) as database:
            for pause_s in (0.0, TIMES.lease + 0.5):  # with leases, and after they ran out
                time.sleep(pause_s)
                with pytest.raises(UsageError) as refused:
                    read_unfinished(database, bench.run, None, COMMIT, repetitions=False)
                said.append(str(refused.value))
    finally:
        os.kill(pid, signal.SIGCONT)

    assert f"process {pid} on this host measures run" in said[1]
    assert bench.wait(pid) == ExitCode.PASS
    bench.check()


@in_a_file
def test_file_locked_by_another(bench):
    pid, _ = under_way(bench)
    with sqlite3.connect(bench.direct, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep(3)
        other.execute("ROLLBACK")
    other.close()

    assert bench.wait(pid) == ExitCode.PASS
    bench.check()


@in_a_file
@pytest.mark.parametrize("is_replaced", [False, True], ids=["deleted", "replaced"])
def test_file_deleted_or_replaced(bench, tmp_path, is_replaced):
    pid, _ = under_way(bench)
    kept = tmp_path / "kept"
    kept.mkdir()
    for path in tmp_path.glob("flexq.sqlite*"):
        path.rename(kept / path.name)
    if is_replaced:
        open_database(bench.direct).close()

    assert bench.wait(pid) == ExitCode.INFRASTRUCTURE
    assert "was deleted or replaced" in bench.said()
    rescued = [path for path in tmp_path.rglob("*.jsonl") if path.is_file()]
    assert rescued, bench.said()
    rescued = [path.rename(kept / f"rescued {path.name}") for path in rescued]
    for path in tmp_path.glob("flexq.sqlite*"):
        path.unlink()
    for path in kept.glob("flexq.sqlite*"):
        shutil.move(path, tmp_path / path.name)
    known = {record.uuid for path in rescued for record in read_records(path)}
    with open_database(bench.direct) as database, database.session() as session:
        for path in rescued:
            import_file(session, path)
    assert known
    bench.finish()
    bench.check()


def server_stopped(bench: Bench) -> None:
    bench.server.handle.stop()
    time.sleep(random.Random(bench.seed).uniform(0.5, 3))
    bench.server.handle.start()


def server_takes_no_writes(bench: Bench) -> None:
    bench.server.execute("ALTER SYSTEM SET default_transaction_read_only = on",
                         "SELECT pg_reload_conf()")  # fmt: skip
    time.sleep(3)
    bench.server.execute("SET default_transaction_read_only = off",
                         "ALTER SYSTEM RESET default_transaction_read_only",
                         "SELECT pg_reload_conf()")  # fmt: skip


def password_changed(bench: Bench) -> None:
    """The server asks for one that coordinators don't have, until it is set right again."""
    rules = bench.server.handle.pgdata / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"local {OURS} all scram-sha-256\n{before}")
    bench.server.execute("SELECT pg_reload_conf()")
    bench.proxy.cut()
    time.sleep(random.Random(bench.seed).uniform(0.5, 3))
    rules.write_text(before)
    bench.server.execute("SELECT pg_reload_conf()")


def server_hangs(bench: Bench) -> None:
    stopped = backends(bench)
    for backend in stopped:
        os.kill(backend, signal.SIGSTOP)
    time.sleep(3)
    for backend in stopped:
        with suppress(ProcessLookupError):
            os.kill(backend, signal.SIGCONT)


def backends(bench: Bench) -> list[int]:
    """Processes of the server that serve our database."""
    with (
        open_database(bench.server.url("postgres"), check_schema=False) as database,
        database.engine.connect() as connection,
    ):
        rows = connection.exec_driver_sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = %s", (OURS,)
        )
        return [pid for (pid,) in rows]


def connections_cut(bench: Bench) -> None:
    bench.proxy.refuses = True
    bench.proxy.cut()
    time.sleep(random.Random(bench.seed).uniform(0.2, 3))
    bench.proxy.heal()


def statements_time_out(bench: Bench) -> None:
    limit = "ALTER SYSTEM SET statement_timeout = '1ms'"
    bench.server.execute(limit, "SELECT pg_reload_conf()")
    try:
        time.sleep(random.Random(bench.seed).uniform(2, 6))
    finally:
        bench.server.execute("ALTER SYSTEM RESET statement_timeout", "SELECT pg_reload_conf()")


@on_a_server
def test_transactions_given_up(bench):
    """Every third write of a result fails: a deadlock, a serialization failure, no memory."""
    bench.server.execute_in(
        OURS,
        "CREATE SEQUENCE IF NOT EXISTS write_number",
        """CREATE OR REPLACE FUNCTION give_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             CASE nextval('write_number') % 9
               WHEN 0 THEN RAISE SQLSTATE '40P01'; WHEN 3 THEN RAISE SQLSTATE '40001';
               WHEN 6 THEN RAISE SQLSTATE '53200'; ELSE RETURN NEW;
             END CASE; END $$""",
        "CREATE TRIGGER give_up BEFORE INSERT ON measurement FOR EACH ROW "
        "EXECUTE FUNCTION give_up()",
    )
    try:
        pid, _ = under_way(bench)
        assert bench.wait(pid) == ExitCode.PASS
        bench.check()
    finally:
        bench.server.execute_in(OURS, "DROP TRIGGER give_up ON measurement")


def traffic_dropped(bench: Bench) -> None:
    bench.proxy.drops = True
    time.sleep(random.Random(bench.seed).uniform(2, 4))
    bench.proxy.heal()


def traffic_delayed(bench: Bench) -> None:
    bench.proxy.delay_s = 0.1
    time.sleep(3)
    bench.proxy.heal()


def network_slow_and_lossy(bench: Bench) -> None:
    bench.proxy.delay_s, bench.proxy.loses = 0.03, 0.02
    time.sleep(6)
    bench.proxy.heal()


def acknowledgements_of_commits_lost(bench: Bench) -> None:
    for _ in range(3):
        bench.proxy.loses_commits = 1
        time.sleep(0.5)


@on_a_server
@pytest.mark.parametrize(
    "fault",
    [
        *(server_stopped, server_takes_no_writes, server_hangs, connections_cut, password_changed),
        *(statements_time_out, traffic_dropped, traffic_delayed, network_slow_and_lossy),
        acknowledgements_of_commits_lost,
    ],
    ids=lambda fault: fault.__name__,
)
def test_outage_of_the_server_is_survived(bench, fault):
    pid, _ = under_way(bench)
    fault(bench)

    assert bench.wait(pid) == ExitCode.PASS
    bench.check()


@dataclass(frozen=True)
class OtherClock:
    """A launcher of coordinators with a clock of the host that `set_ahead` moves."""

    launcher: Launcher
    file: Path

    def set_ahead(self, seconds: int) -> None:
        self.file.write_text(str(seconds))


@pytest.fixture(scope="session")
def other_clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherClock]:
    folder = tmp_path_factory.mktemp("clock")
    source, library, file = (
        Path(__file__).with_name("clock.c"),
        folder / "clock.so",
        folder / "ahead",
    )
    if shutil.which("cc") is None:
        pytest.skip("no C compiler, which builds the clock")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    file.write_text("0")
    warm = Launcher(LD_PRELOAD=str(library), FAULT_CLOCK=str(file))
    yield OtherClock(warm, file)
    warm.close()


@on_a_server
@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_host_clock_skewed(bench, other_clock, ahead_s):
    other_clock.set_ahead(ahead_s)
    first = under_way(bench)
    second = bench.start(other_clock.launcher)
    os.kill(first[0], signal.SIGKILL)

    bench.wait(first[0])
    assert bench.wait(second[0], other_clock.launcher) == ExitCode.PASS
    bench.check()


def test_host_clock_jumps_while_one_of_two_is_killed(bench, other_clock):
    """Forward, back to before the run began, or both; leases of the killed one remain."""
    chance = random.Random(f"clock {bench.seed}")
    other_clock.set_ahead(chance.choice([0, 7200]))
    first = under_way(bench, other_clock.launcher)
    second = bench.start(other_clock.launcher, busy_s=BUSY_TIMEOUT_S)
    os.kill(first[0], signal.SIGKILL)
    for ahead_s in chance.sample([-7200, -60, 60, 3600], 2):
        other_clock.set_ahead(ahead_s)
        time.sleep(chance.uniform(0.2, 1))

    bench.wait(first[0], other_clock.launcher)
    assert bench.wait(second[0], other_clock.launcher) == ExitCode.PASS
    bench.check()


@pytest.fixture(scope="session")
def other_host() -> Iterator[tuple[Launcher, str, str]]:
    """A launcher in a network of its own, this side's address in it, and its link's name."""
    if shutil.which("ip") is None:
        pytest.skip("no ip, which makes networks")
    own = os.getpid() % 100_000
    name, here, there = f"fqb{own}", f"fqbh{own}", f"fqbt{own}"
    network = 4 * (own % (1 << 14))  # of two addresses, which no other session has
    mine, theirs = (f"10.213.{(network + n) >> 8}.{(network + n) & 255}" for n in (1, 2))
    commands = (
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there}",
        f"ip link set {there} netns {name}",
        f"ip addr add {mine}/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} addr add {theirs}/30 dev {there}",
        f"ip -n {name} link set {there} up",
        f"ip -n {name} link set lo up",
    )
    for command in commands:
        if subprocess.run(command.split(), capture_output=True).returncode:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            pytest.skip("network namespaces are not permitted here")
    warm = Launcher("ip", "netns", "exec", name)
    yield warm, mine, here
    warm.close()
    subprocess.run(["ip", "netns", "del", name], check=True)


@on_a_server
def test_two_hosts_one_loses_its_network(bench, other_host):
    elsewhere, address, link = other_host
    proxy = Proxy(bench.server.socket, address)
    url = f"postgresql://postgres@{address}:{proxy.port}/{OURS}"
    far, log = bench.start(elsewhere, database=url)
    near, _ = bench.start()
    bench.until_stored(2, log)
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    time.sleep(random.Random(bench.seed).uniform(2, 5))
    subprocess.run(["ip", "link", "set", link, "up"], check=True)

    assert bench.wait(near) == ExitCode.PASS
    assert bench.wait(far, elsewhere) == ExitCode.PASS
    proxy.close()
    bench.check()

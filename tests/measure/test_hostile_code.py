"""Attacks in a sandbox: each is refused or has no effect; without one, many work."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexq_bench.measure.ab.unchanged_files import UnchangedFiles
from flexq_bench.measure.launcher import ForkServer
from flexq_bench.measure.own_secrets import hidden_secrets
from flexq_bench.measure.sandbox import KINDS, Kind, Sandbox, SandboxLimits, obstacle
from tests.measure import hostile

SECRET = "the secret"
LIMITS = SandboxLimits(memory_bytes=256 << 20, files_bytes=64 << 20, processes=100)
WORKING = [kind for kind in KINDS if not obstacle(kind)]
ALONE = hostile.ATTACKS.keys() - set().union(*hostile.GROUPS.values())

pytestmark = pytest.mark.skipif(not WORKING, reason="this machine allows no sandbox")


@dataclass
class Victim:
    """A judge with secrets, and what an attack changed."""

    tree: Path
    files: UnchangedFiles
    sleep_s: str  # argument of processes that stay
    facts: dict[str, object]
    environment: dict[str, str]

    def attack(self, name: str, kind: Kind) -> tuple[str, str]:
        """Run an attack, or a group of them; return its stdout and stderr."""
        code = hostile.ATTACKS.get(name) or hostile.GROUP.format(
            codes=json.dumps(hostile.GROUPS[name])
        )
        write = [Path(str(self.facts["output"]))]
        sandbox = Sandbox(self.environment, kind, [self.tree], write, limits=LIMITS)
        command = [sys.executable, "-I", "-S", "-c", hostile.PROLOGUE + code]
        # Files, because processes that stay would keep pipes open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            subprocess.run(
                sandbox.wrap(command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=60,
                check=False,
                start_new_session=True,
            )
            for file in (out, err):
                file.seek(0)
            return out.read(), err.read()

    def left(self) -> list[int]:
        """Processes that stayed."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.sleep_s.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


@pytest.fixture
def victim(tmp_path, monkeypatch) -> Iterator[Victim]:
    """This process, with a database that is open, sockets that listen, and a token."""
    home, tree, cache, exchange = (tmp_path / name for name in ("home", "tree", "cache", "other"))
    for folder in (home / ".ssh", tree, cache / "cubin", exchange, tmp_path / "mine" / "tmp"):
        folder.mkdir(parents=True)
    tmp_path.chmod(0o755)
    (home / ".ssh" / "id_rsa").write_text(SECRET)
    (tree / "base.py").write_text("slow = 0\n")
    (tree / ".env").write_text(SECRET)
    (tree / ".git").mkdir()
    (cache / "cubin" / "entry.cubin").write_bytes(b"good")
    (exchange / "inputs").write_bytes(b"of base")
    output = tmp_path / "output"
    output.touch()
    output.chmod(0o666)
    monkeypatch.setenv("TOKEN", SECRET)
    text = ctypes.create_string_buffer(SECRET.encode())
    sleep_s = f"1{time.monotonic_ns() % 10**9}"
    with ExitStack() as stack:
        stack.enter_context(hidden_secrets())
        database = sqlite3.connect(home / "results.sqlite")
        stack.callback(database.close)
        database.execute("create table a (b)")
        database.commit()
        addresses = (str(home / "service.sock"), "\0" + sleep_s, ("127.0.0.1", 0))
        listening = []
        for address in addresses:
            family = socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX
            listening.append(stack.enter_context(socket.socket(family)))
            listening[-1].bind(address)
            listening[-1].listen()
        shared = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        shared.chmod(0o755)
        (shared / "result").write_text(SECRET)
        facts = {
            "shared": str(shared / "result"),
            "judge": os.getpid(),
            "tree": str(tree),
            "home": str(home),
            "cache": str(cache),
            "exchange": str(exchange),
            "output": str(output),
            "database": str(home / "results.sqlite"),
            "socket": addresses[0],
            "abstract": sleep_s,
            "port": listening[-1].getsockname()[1],
            "address": ctypes.addressof(text),
            "packages": sysconfig.get_path("purelib"),
            "sleep": shutil.which("sleep"),
            "mark": sleep_s,
        }
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "mine"),
            "TMPDIR": str(tmp_path / "mine" / "tmp"),
            "VICTIM": json.dumps(facts),
        }
        files = UnchangedFiles([tree, cache, exchange, shared])
        made = Victim(tree, files, sleep_s, facts, environment)
        yield made
        for pid in made.left():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("group", hostile.GROUPS)
def test_group_of_attacks_in_a_sandbox_has_no_effect(victim, eventually, group):
    assert "all tried" in _check_no_effect(victim, group, WORKING[0], eventually)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ALONE else pytest.mark.slow)
        for name in hostile.ATTACKS
    ],
)
def test_attack_in_a_sandbox_has_no_effect(victim, eventually, name):
    _check_no_effect(victim, name, WORKING[0], eventually)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WORKING[1:])
@pytest.mark.parametrize("name", hostile.ATTACKS)
def test_attack_in_another_kind_of_sandbox_has_no_effect(victim, eventually, name, kind):
    _check_no_effect(victim, name, kind, eventually)


@pytest.mark.parametrize("name", hostile.HARMLESS)
def test_attack_without_a_sandbox_works(victim, name):
    if name == "opens the database by the judge's descriptor" and os.geteuid():
        pytest.skip("the judge's process is closed to other programs of an ordinary user")
    out, _ = victim.attack(name, "none")

    assert "done" in out or victim.left() or victim.files.first_changed()


@pytest.mark.parametrize("name", ["reads the judge's environment", "reads every environment"])
def test_first_environment_is_erased_without_a_sandbox(victim, name):
    assert SECRET not in victim.attack(name, "none")[0]


def test_there_are_forty_attacks():
    assert len(hostile.ATTACKS) >= 40
    assert set(hostile.HARMLESS) <= hostile.ATTACKS.keys()


def test_a_plain_program_runs_in_every_kind(victim):
    code = "import os; open(os.environ['TMPDIR'] + '/mine', 'w').write('x'); print(os.getpid())"
    for kind in WORKING:
        sandbox = Sandbox(victim.environment, kind, [victim.tree])
        command = sandbox.wrap([sys.executable, "-c", code])
        done = subprocess.run(command, env=victim.environment, capture_output=True, check=True)
        assert done.stdout == b"1\n"  # the first process of its namespace


@pytest.mark.parametrize("kind", WORKING)
@pytest.mark.parametrize("target", ["victim", "elsewhere", "nowhere"])
def test_link_with_a_dot_in_a_tree_is_no_obstacle(victim, tmp_path, kind, target):
    (tmp_path / "elsewhere").mkdir()
    places = {"victim": victim.tree, "elsewhere": tmp_path / "elsewhere", "nowhere": "/absent"}
    (victim.tree / ".link").symlink_to(places[target])

    command = Sandbox(victim.environment, kind, [victim.tree]).wrap(["/bin/true"])

    subprocess.run(command, env=victim.environment, check=True)


@pytest.mark.parametrize("kind", WORKING)
def test_private_folders_can_be_written_beside_what_is_read_there(victim, kind):
    program = Path(victim.environment["HOME"], ".cache", "mine", "program")
    program.mkdir(parents=True)
    (program / "code.py").touch()
    code = (
        "import os; os.chdir(os.environ['HOME']); os.mkdir('.cache/a'); os.mkdir('.cache/mine/b')"
    )
    code += "; print(os.listdir('.cache/mine/program'))"

    command = Sandbox(victim.environment, kind, [program]).wrap([sys.executable, "-c", code])
    done = subprocess.run(command, env=victim.environment, capture_output=True, check=True)

    assert done.stdout == b"['code.py']\n"


@pytest.mark.parametrize("kind", WORKING)
def test_private_folder_may_lie_in_what_is_read(victim, kind):
    cache = victim.tree / "my" / "cache"
    environment = {**victim.environment, "FLEXQ_BENCH_CACHE": str(cache)}
    code = "import os; os.mkdir(os.environ['FLEXQ_BENCH_CACHE'] + '/a'); print(os.listdir('.'))"

    command = Sandbox(environment, kind, [victim.tree]).wrap([sys.executable, "-c", code])
    done = subprocess.run(
        command, env=environment, cwd=victim.tree, capture_output=True, check=True
    )

    assert b"base.py" in done.stdout
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("end", [pytest.param("", marks=pytest.mark.slow), "os.chmod('/tmp/x', 0)"])
@pytest.mark.parametrize("kind", WORKING)
def test_a_process_finds_no_files_of_an_earlier_one(victim, kind, end):
    code = """
import os
places = [os.environ["HOME"], os.environ["TMPDIR"], "/tmp", "/dev/shm"]
print([place for place in places if os.path.exists(place + "/x")])
for place in places:
    os.makedirs(place + "/x" + "/y" * 900)
    open(place + "/x/y/file", "w").close()
os.rename(os.environ["TMPDIR"], os.environ["HOME"] + "/moved")
os.symlink(os.environ["HOME"], os.environ["TMPDIR"])
"""
    write = [Path(str(victim.facts["output"]))]
    sandbox = Sandbox(victim.environment, kind, [victim.tree], write)

    with ForkServer(wrap=sandbox.wrap) as server:
        for _ in range(3):
            output = _output_of(server, code + end, victim.environment)
            server.reset(map(Path, sandbox.scratch))
            assert output == (0, "[]\n")


# On the server that forked it, which is process 1 of its namespace.
ON_THE_SERVER = {
    "traces it": "call('ptrace', 0x4206, 1, None, None)",
    "reads its memory": "open('/proc/1/mem', 'rb')",
    "writes to its log": "open('/proc/1/fd/2', 'w')",
    "takes its socket": """
if libc.syscall(438, os.pidfd_open(1), 0, 0) < 0:
    raise PermissionError""",
    "is found in its memory": "os.readlink('/proc/1/cwd')",
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGSTOP)


@pytest.mark.parametrize("kind", WORKING)
def test_process_can_do_nothing_to_the_server_that_forked_it(victim, kind):
    sandbox = Sandbox(victim.environment, kind, [victim.tree])
    with ForkServer(wrap=sandbox.wrap) as server:
        for what, code in ON_THE_SERVER.items():
            returncode, output = _output_of(
                server, f"{hostile.PROLOGUE}\n{code}\ndone()", victim.environment
            )
            assert returncode != 0, what
            assert "done" not in output, what
        for number in SIGNALS:
            _output_of(server, f"import os; os.kill(1, {number})", victim.environment)
        assert _output_of(server, "print(42)", victim.environment) == (0, "42\n")


@pytest.mark.parametrize("kind", WORKING)
@pytest.mark.parametrize("what", ["reserve_bytes", "disk_bytes"])
def test_sandbox_ends_before_memory_or_a_disk_is_full(victim, kind, what):
    limits = SandboxLimits(**{what: 1 << 60})
    write = [Path(str(victim.facts["output"]))]
    sandbox = Sandbox(victim.environment, kind, write=write, limits=limits)
    command = sandbox.wrap(["/bin/sleep", "60"])
    done = subprocess.run(command, env=victim.environment, capture_output=True, check=False)

    left = {"reserve_bytes": b"the machine's memory", "disk_bytes": b"the disk of"}[what]
    assert done.returncode != 0
    assert b"GB of " + left in done.stderr


@pytest.mark.parametrize("name", [b"\xff", b"\rRssAnon: -9999"], ids=ascii)
def test_memory_of_a_process_of_any_name_is_counted(victim, name):
    sandbox = Sandbox(victim.environment, WORKING[0], limits=SandboxLimits(memory_bytes=20 << 20))
    code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name}); a = b'a' * (20 << 20)"
    command = sandbox.wrap([sys.executable, "-S", "-c", f"{code}; time.sleep(9)"])

    done = subprocess.run(command, env=victim.environment, capture_output=True, check=False)

    assert b"its processes use" in done.stderr


def _output_of(launcher, code, environment) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as err:
        process = launcher.start(
            (sys.executable, "-S", "-c", code), folder=Path(), environment=environment, stderr=err
        )
        with process.stdin, process.stdout:
            written = process.stdout.read().decode()
            code = process.wait(30.0)
        err.seek(0)
        return code, written + err.read()


@pytest.mark.parametrize("kind", WORKING)
@pytest.mark.parametrize(("code", "expected"), [("exit(7)", 7), ("import os; os.abort()", None)])
def test_a_sandbox_ends_as_its_command(victim, kind, code, expected):
    command = Sandbox(victim.environment, kind).wrap([sys.executable, "-c", code])
    done = subprocess.run(command, env=victim.environment, capture_output=True, check=False)

    by_signal = done.returncode < 0 or done.returncode > 128  # bubblewrap's own code of a signal
    assert done.returncode == expected if expected else by_signal


@pytest.mark.parametrize("kind", WORKING)
def test_the_end_of_the_judge_ends_the_sandbox(victim, eventually, kind):
    code = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE).stdout.readline())
"""
    inside = ["/bin/sh", "-c", f"echo started; exec sleep {victim.sleep_s}"]
    wrapped = Sandbox(victim.environment, kind).wrap(inside)
    command = [sys.executable, "-c", code, *wrapped]
    subprocess.run(command, env=victim.environment, stdout=subprocess.DEVNULL, check=True)

    eventually(lambda: not victim.left())


def _check_no_effect(
    victim: Victim, name: str, kind: Kind, eventually: Callable[[Callable[[], object]], None]
) -> str:
    if (name, kind) == ("makes files without end", "bubblewrap"):
        pytest.skip("bubblewrap limits the bytes of files, not their number")
    out, err = victim.attack(name, kind)

    assert "done" not in out, out
    assert SECRET not in out
    assert "no sandbox" not in err, err
    assert victim.files.first_changed() == ""
    assert Path(str(victim.facts["output"])).stat().st_size <= LIMITS.files_bytes
    eventually(lambda: not victim.left())
    return out

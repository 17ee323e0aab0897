"""Finding of marked processes, in a folder like /proc."""

from __future__ import annotations

import signal

import pytest

from flexq_bench.repository import descendants
from flexq_bench.repository.descendants import new_mark, stop_marked


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """processes(pid, environment): a process of this id, in place of one there may be."""
    monkeypatch.setattr(descendants, "_PROC", str(tmp_path))
    monkeypatch.setattr(descendants, "_known", {})

    def start(pid, environment):
        made = tmp_path / f"new {pid}"
        made.mkdir()
        (made / "stat").write_text(f"{pid} (a) b) S 1 1")
        (made / "environ").write_bytes(environment.encode())
        if (tmp_path / str(pid)).exists():
            (tmp_path / str(pid)).rename(tmp_path / f"old {pid}")
        made.rename(tmp_path / str(pid))

    return start


def test_new_process_of_an_old_id_is_stopped(processes, monkeypatch):
    sent, mark = [], new_mark()
    monkeypatch.setattr(descendants.os, "kill", lambda *signalled: sent.append(signalled))
    processes(7, "A=1\0")
    assert stop_marked([mark]) == set()

    processes(7, f"A=1\0{mark}=1\0")

    assert stop_marked([mark]) == {7}
    assert sent == [(7, signal.SIGSTOP)]


def test_processes_are_read_in_their_first_second(processes, monkeypatch):
    read, now, mark = [], [0.0], new_mark()
    content = descendants._content
    monkeypatch.setattr(descendants.os, "kill", lambda *_: None)
    monkeypatch.setattr(descendants.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(descendants, "_content", lambda path: read.append(path) or content(path))
    processes(8, f"A=1\0{mark}=1\0")
    assert stop_marked([mark]) == {8}
    now[0] = 2.0
    processes(9, "B=1\0")
    read.clear()

    assert stop_marked([mark]) == {8}
    assert {path.split("/")[-2] for path in read} == {"9"}


def test_process_that_takes_its_mark_later_is_stopped(processes, monkeypatch, tmp_path):
    monkeypatch.setattr(descendants.os, "kill", lambda *_: None)
    mark = new_mark()
    processes(8, "A=1\0")
    assert stop_marked([mark]) == set()
    (tmp_path / "8" / "environ").write_bytes(f"{mark}=1\0".encode())

    assert stop_marked([mark]) == {8}


def test_child_without_its_parents_environment_is_stopped(processes, monkeypatch, tmp_path):
    mark = new_mark()
    monkeypatch.setattr(descendants.os, "kill", lambda *_: None)
    processes(8, f"{mark}=1\0")
    processes(9, "B=1\0")
    (tmp_path / "9" / "stat").write_text("9 (a) S 8 1")

    assert stop_marked([mark]) == {8, 9}
    assert stop_marked([mark]) == {8, 9}  # known by now

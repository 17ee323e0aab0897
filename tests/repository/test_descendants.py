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

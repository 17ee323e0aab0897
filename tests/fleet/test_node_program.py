"""The node's end of a shipped program, in this process and without Ray."""

from __future__ import annotations

import hashlib
import pickle

import pytest

from flexq_bench.fleet import node_program
from flexq_bench.fleet.node_program import check_versions, class_that_loads, unpacked, versions
from flexq_bench.fleet.shipping import packed


class Adder:
    def __init__(self, first: int) -> None:
        self.first = first

    def add(self, second: int) -> int:
        return self.first + second

    def fail(self) -> None:
        raise KeyError("why")


class HasProgram:
    def load(self) -> None:
        pass


class HasOtherVersions:
    def load(self) -> None:
        check_versions({**versions(), "torch": "0.1"})


def created(program):
    pickled = pickle.dumps((Adder, (40,)))
    return class_that_loads(Adder)(program, pickled, [])


def test_answers_and_errors_of_an_actor_are_bytes():
    actor = created(HasProgram())

    succeeded, answer = actor.add(pickle.dumps((2,)))
    failed, error = actor.fail()

    assert (succeeded, pickle.loads(answer)) == (True, 42)
    assert failed is False
    assert isinstance(pickle.loads(error), KeyError)


def test_node_with_other_versions_is_refused_with_both():
    succeeded, error = created(HasOtherVersions()).add(pickle.dumps((2,)))

    assert not succeeded
    refusal = pickle.loads(error)
    assert isinstance(refusal, ImportError)
    assert f"has torch {versions()['torch']}, and the coordinator torch 0.1" in str(refusal)


@pytest.mark.parametrize("change", [{"torch": "+cu130"}, {"cupy-cuda13x": "14.0"}])
def test_local_versions_and_packages_of_one_side_do_not_count(monkeypatch, change):
    here = {"torch": "2.11.0+cpu"}
    monkeypatch.setattr(node_program, "versions", lambda: here)
    theirs = {"torch": "2.11.0", **{n: v for n, v in change.items() if n != "torch"}}
    theirs["torch"] += change.get("torch", "")

    check_versions(theirs)


def test_folder_is_unpacked_once_and_damage_is_refused(tmp_path):
    (tmp_path / "made" / "inner").mkdir(parents=True)
    (tmp_path / "made" / "inner" / "file").write_text("text")
    content = packed(tmp_path / "made")
    digest, home = hashlib.sha256(content).hexdigest(), tmp_path / "home"

    with pytest.raises(OSError, match="damaged"):
        unpacked(home, digest, lambda: content[:-1])
    folder = unpacked(home, digest, lambda: content)

    assert (folder / "made" / "inner" / "file").read_text() == "text"
    assert unpacked(home, digest, lambda: pytest.fail("fetched again")) == folder

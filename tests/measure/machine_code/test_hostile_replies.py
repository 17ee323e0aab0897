"""Replies of a head's process that lists and compiles builds, and files that it names."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flexq_bench.errors import InfrastructureError
from flexq_bench.kernels.runtime.sources import included_files
from flexq_bench.measure.machine_code.revision_builds import Revision

LAUNCHED = {"block": ["tiny", 256, 0], "min_sm": 80, "only_sm": None}
OWNED = {"kernels": ["tiny"], "default_of": ["tiny"]}
BUILD = {"source": "tiny.cu", "defines": [["COUNT", 4]], **LAUNCHED, **OWNED}
CODE = {"index": 0, "target": "sm_86", "code": "0.cubin"}


class Forged:
    """A process that answers with these replies, one after the other."""

    name = "head 1a2b3c"

    def __init__(self, tree: Path, *replies: dict[str, Any]) -> None:
        self.tree, self._replies = tree, list(replies)

    def send(self, _what: str, **_arguments: Any) -> None:
        pass

    def receive(self) -> dict[str, Any]:
        return self._replies.pop(0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    sources = tmp_path / "kernels" / "csrc"
    (tmp_path / "kernels" / "runtime").mkdir(parents=True)
    sources.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "kernels" / "runtime" / "nvrtc.py").touch()
    (sources / "tiny.cu").touch()
    (sources / "odd.cu").write_text(f'#include "{"x" * 5000}"\n#include "pipe"\n')
    os.mkfifo(sources / "pipe")
    (sources / "endless.cu").symlink_to("/dev/zero")
    (tmp_path / "out" / "0.cubin").write_bytes(b"code")
    os.mkfifo(tmp_path / "out" / "pipe")
    (tmp_path / "out" / "link").symlink_to(tmp_path / "kernels" / "csrc" / "tiny.cu")
    return tmp_path


def compiled(tree: Path, listed: Any, *codes: dict[str, Any], labels: Any = ("tiny",)) -> list[Any]:
    forged = Forged(tree, {"labels": labels}, {"builds": listed}, *codes)
    revision = Revision(forged, tree / "out")  # type: ignore[arg-type]
    revision.labels()
    builds = revision.builds()
    revision.start([(build, "sm_86") for build in builds])
    return list(revision.compiled())


def test_honest_replies_are_read(tree):
    (found,) = compiled(tree, [BUILD], CODE)

    assert found.cubin.code == b"code"
    assert compiled(tree, [BUILD | {"source": "odd.cu"}], CODE)[0].cubin is not None


def test_headers_may_include_each_other_to_any_depth(tmp_path):
    for number in range(50):
        (tmp_path / f"{number}.cuh").write_text(f'#include "{number + 1}.cuh"\n')
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 30)
    try:
        found = included_files(tmp_path, "0.cuh")
    finally:
        sys.setrecursionlimit(limit)

    assert len(found) == 50


@pytest.mark.parametrize(
    "change",
    [
        {"source": "endless.cu"},
        {"source": "pipe"},
        {"source": "../../../dev/zero"},
        {"source": "/dev/zero"},
        {"source": "absent.cu"},
        {"source": "a\0b"},
        {"source": 7},
        {"defines": 7},
        {"defines": [[1]]},
        {"block": ["tiny", "x", 0]},
        {"block": 7},
        {"only_sm": "x"},
        {"min_sm": None},
        {"kernels": 7},
    ],
    ids=ascii,
)
def test_build_that_is_none_is_its_process_error(tree, change):
    with pytest.raises(InfrastructureError, match="head 1a2b3c gave a reply that can't be read"):
        compiled(tree, [BUILD | change], CODE)


@pytest.mark.parametrize(
    "change",
    [
        *({"code": name} for name in ("pipe", "link", "../out/0.cubin", "", ".", "a\0b", 7)),
        *({"index": index} for index in (1, "x", [0])),
        {"target": "sm_1"},
    ],
    ids=ascii,
)
def test_machine_code_that_is_none_is_its_process_error(tree, change):
    with pytest.raises(InfrastructureError, match=r"head 1a2b3c|no file"):
        compiled(tree, [BUILD], CODE | change)


@pytest.mark.parametrize("labels", [7, None])
def test_labels_that_are_none_are_their_process_error(tree, labels):
    with pytest.raises(InfrastructureError, match="head 1a2b3c"):
        compiled(tree, [BUILD], CODE, labels=labels)

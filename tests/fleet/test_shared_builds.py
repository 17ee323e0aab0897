"""Builds that nodes share: made once, fetched by the others, made again if that failed."""

from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from flexq_bench.fleet import shared_builds
from flexq_bench.fleet.shared_builds import BuildRegistry, NodeBuilds
from flexq_bench.repository import project_builds
from flexq_bench.repository.project import open_project
from flexq_bench.repository.project_builds import BuildError, built_tree, share_builds


@pytest.fixture
def registry(clock, monkeypatch):
    monkeypatch.setattr(shared_builds, "_POLL_INTERVAL_S", 0.0)
    return BuildRegistry(clock)


@pytest.fixture
def node(registry):
    """A node, as the registry sees it."""
    return NodeBuilds(lambda method, *arguments: getattr(registry, method)(*arguments))


def test_second_node_fetches_what_the_first_made(node, tmp_path):
    home = tmp_path / "builds" / "key"
    with node.building(home, 60) as is_there:
        assert not is_there
        (home / "tree").mkdir(parents=True)
        (home / "tree" / "module.so").write_bytes(b"code")
        (home / "tree" / "module.so").chmod(0o755)
        (home / "tree" / "link.so").symlink_to("module.so")
    home.rename(tmp_path / "on the first node")

    with node.building(home, 60) as is_there:
        assert is_there

    assert (home / "tree" / "link.so").read_bytes() == b"code"
    assert os.access(home / "tree" / "module.so", os.X_OK)
    assert [path.name for path in home.parent.iterdir()] == ["key"]


def test_failed_build_is_made_again_elsewhere(node, tmp_path):
    with pytest.raises(BuildError), node.building(tmp_path, 60):
        raise BuildError("does not build here")

    with node.building(tmp_path, 60) as is_there:
        assert not is_there


def test_build_of_a_lost_node_is_made_again(registry, clock):
    assert registry.claim("key", 60).what == "build"
    assert registry.claim("key", 60).what == "wait"
    clock.now += 61

    assert registry.claim("key", 60).what == "build"


def test_nodes_with_other_paths_or_images_share_nothing(node, tmp_path, monkeypatch):
    for home in (tmp_path / "one" / "key", tmp_path / "other" / "key"):
        with node.building(home, 60) as is_there:
            assert not is_there
            home.mkdir(parents=True)
    monkeypatch.setattr(shared_builds, "_image", lambda: "another image")

    with node.building(tmp_path / "one" / "key", 60) as is_there:
        assert not is_there
        (tmp_path / "one" / "key").mkdir(exist_ok=True)


def test_waiting_for_another_node_has_an_end(registry, node, tmp_path):
    registry.claim = lambda *arguments: shared_builds.Claim("wait")

    with node.building(tmp_path, 0.0) as is_there:
        assert not is_there


def test_node_without_the_registry_builds_by_itself(tmp_path):
    def lost(*arguments):
        raise ConnectionError("its node has died")

    with NodeBuilds(lost).building(tmp_path, 60) as is_there:
        assert not is_there


@pytest.fixture
def acme(tmp_path, monkeypatch, git):
    """A project whose build writes a file, and the number of builds."""
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "acme"
    folder.mkdir()
    (folder / "kernels.py").write_text("")
    build = f"echo built >> {tmp_path}/builds.log; echo 1 > made.txt"
    names = 'version = 1\nname = "acme"\nsuite = "smoke"\nkernels = ["kernels.py"]\n'
    (folder / "flexq-bench.toml").write_text(f'{names}[build]\ncommand = "{build}"\n')
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    yield open_project(str(folder)), git(folder, "rev-parse", "HEAD"), tmp_path / "builds.log"
    share_builds(None)


def test_commit_is_built_once_for_two_nodes(acme, node, tmp_path):
    project, commit, log = acme
    share_builds(node)
    first = built_tree(project, commit)
    (tmp_path / "cache").rename(tmp_path / "cache of the first node")

    second = built_tree(project, commit)

    assert second.folder == first.folder
    assert (second.folder / "made.txt").read_text() == "1\n"
    assert log.read_text() == "built\n"


def test_unreviewed_commit_is_never_shared(acme, node, tmp_path):
    project, commit, log = acme
    share_builds(node)
    for name in ("one", "two"):
        own = {**os.environ, "FLEXQ_BENCH_CACHE": str(tmp_path / name)}
        built_tree(project, commit, variables=own, isolated=as_it_is)

    assert log.read_text() == "built\n" * 2
    assert project_builds._shared is node


@contextmanager
def as_it_is(home, network):
    yield tuple

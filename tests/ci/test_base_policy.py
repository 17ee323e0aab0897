"""Policies and suites read from the base commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexq_bench.ci.base_policy import load_policy_of
from flexq_bench.ci.policy import load_policy
from flexq_bench.workloads.errors import WorkloadError

SUITE = 'description = "x"\n[[group]]\nkernels = ["cublas-fp16"]\nm = "1"\nshapes = ["{shape}"]\n'
POLICY = 'version = 1\nsuite = "{suite}"\nslower_percent = {percent}\n'
WAIVER = (
    '[[waiver]]\nkernels = ["cublas-fp16"]\nreason = "mine"\nowner = "Eve"\nexpires = 2099-01-01\n'
)


@pytest.fixture
def repository(tmp_path: Path, git) -> Path:
    """Base's files are committed; head's, which are laxer in all they say, are checked out."""
    folder = tmp_path / "repository"
    for path, text in (
        ("ci/policies/default.toml", POLICY.format(suite="nightly", percent=1)),
        ("ci/policies/beside.toml", POLICY.format(suite="own.toml", percent=1)),
        ("ci/policies/above.toml", POLICY.format(suite="../../mine/own.toml", percent=1)),
        ("ci/policies/own.toml", SUITE.format(shape="512x512")),
        ("mine/own.toml", SUITE.format(shape="512x512")),
        ("workloads/suites/nightly.toml", SUITE.format(shape="512x512")),
    ):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "base")
    for path in folder.rglob("*.toml"):
        text = path.read_text().replace("512x512", "8x8").replace("percent = 1", "percent = 99")
        path.write_text(text + (WAIVER if "version" in text else ""))
    return folder


@pytest.fixture
def load(repository, monkeypatch):
    monkeypatch.chdir(repository)

    def load(name_or_path):
        return load_policy_of(repository, "HEAD", name_or_path)

    return load


@pytest.mark.parametrize(
    "named",
    ["default", "ci/policies/default.toml", "ci/policies/beside.toml", "ci/policies/above.toml"],
)
@pytest.mark.parametrize("absolute", [False, True])
def test_limits_waivers_and_shapes_are_bases(load, repository, named, absolute):
    found = load(str(repository / named) if absolute and "/" in named else named)

    assert (found.default.slower_percent, found.waivers) == (1.0, ())
    assert [(shape.n, shape.k) for shape in found.suite.shapes] == [(512, 512)]


def test_link_of_head_is_not_followed(load, repository, tmp_path):
    lax = tmp_path / "lax.toml"
    lax.write_text(POLICY.format(suite="nightly", percent=99))
    policy = repository / "ci/policies/default.toml"
    policy.unlink()
    policy.symlink_to(lax)

    assert load("ci/policies/default.toml").default.slower_percent == 1.0


def test_policy_outside_the_repository_is_read_as_it_is(load, tmp_path):
    own = tmp_path / "operator.toml"
    own.write_text(POLICY.format(suite="nightly", percent=5))

    found = load(str(own))

    assert (found.name, found.default.slower_percent) == ("operator", 5.0)
    assert [(shape.n, shape.k) for shape in found.suite.shapes] == [(512, 512)]


def test_suite_outside_the_repository_is_relative_to_the_policy(load, tmp_path):
    (tmp_path / "few.toml").write_text(SUITE.format(shape="64x64"))
    own = tmp_path / "operator.toml"
    own.write_text(POLICY.format(suite="few.toml", percent=5))

    assert [(shape.n, shape.k) for shape in load(str(own)).suite.shapes] == [(64, 64)]


def test_suite_in_the_repository_is_always_that_of_base(load, repository, tmp_path):
    own = tmp_path / "operator.toml"
    own.write_text(POLICY.format(suite=f"{repository}/mine/own.toml", percent=5))

    assert [(shape.n, shape.k) for shape in load(str(own)).suite.shapes] == [(512, 512)]


def test_policy_only_in_head_is_refused(load, repository):
    (repository / "ci/policies/new.toml").write_text(POLICY.format(suite="nightly", percent=99))

    with pytest.raises(WorkloadError, match=r"has no ci/policies/new.toml: a gate reads base's"):
        load("ci/policies/new.toml")
    with pytest.raises(WorkloadError, match="no policy 'new'"):
        load("new")


def test_base_without_policies_has_the_bundled_ones(tmp_path, git):
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "empty")

    assert load_policy_of(tmp_path, "HEAD", "default") == load_policy("default")

"""Commits of a repository as files, for machines that don't have the repository.

The files of a commit are a pack of git with the commit and all its files, without its history; one
such pack for each submodule that the clone has; and the contents of git-lfs. A clone made of them
serves like the repository for everything that reads single commits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flexq_bench.errors import InfrastructureError
from flexq_bench.kernels.runtime.files import in_cache
from flexq_bench.repository.git import git_output
from flexq_bench.repository.project_builds import large_files_of, submodules_of

_MANIFEST = "commit.json"
_LFS = Path("lfs", "objects")


def write_commit(root: Path, sha: str, folder: Path) -> None:
    """Write the files of a commit to an empty folder. Raises GitError."""
    there, _missing = submodules_of(root, sha)
    repositories = [(root, sha, Path()), *there]
    described: list[dict[str, Any]] = []
    for repository, commit, path in repositories:
        objects = git_output(repository, "rev-list", "--objects", "--no-walk", commit)
        options = ("--quiet", "--threads=1", str(folder / "pack"))
        name = git_output(repository, "pack-objects", *options, input_text=f"{objects}\n")
        # A repository without the option has the format of all versions before it.
        form = git_output(repository, "rev-parse", "--show-object-format")
        described.append({"path": str(path), "commit": commit, "pack": name, "format": form})
    for index in folder.glob("*.idx"):
        index.unlink()  # the receiver computes it, and so verifies the objects
    contents, _ = large_files_of(root, sha)
    for content in contents.values():
        place = folder / _LFS / Path(*content.parts[-3:])
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(content, place)
    (folder / _MANIFEST).write_text(json.dumps(described), "utf-8")


def clone_with(commits: Mapping[str, Path], home: Path) -> Path:
    """Return a clone that has these commits, from folders of `write_commit`, by full sha.

    It is in `home`, and made on the first call; other processes see all of it or nothing. Raises
    GitError, CacheError, and InfrastructureError if a folder does not have its commit.
    """
    key = hashlib.sha256("\0".join(sorted(commits)).encode()).hexdigest()[:32]
    clone = home / key
    if clone.is_dir():
        return clone
    with in_cache(home):
        scratch = Path(tempfile.mkdtemp(dir=home, prefix=".new-"))
    try:
        for sha, folder in commits.items():
            _add(scratch, sha, folder)
        scratch.rename(clone)
    except OSError:
        if not clone.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return clone


def _add(clone: Path, sha: str, folder: Path) -> None:
    described = json.loads((folder / _MANIFEST).read_text("utf-8"))
    if described[0]["commit"] != sha:
        raise InfrastructureError(f"{folder} has {described[0]['commit'][:10]} and not {sha[:10]}")
    for repository in described:
        place = clone / repository["path"]
        if not (place / ".git").is_dir():
            place.mkdir(parents=True, exist_ok=True)
            git_output(
                place, "init", "--quiet", "--template=", f"--object-format={repository['format']}"
            )
            git_output(place, "config", "gc.auto", "0")
        pack = place / ".git" / "objects" / "pack" / f"pack-{repository['pack']}.pack"
        pack.parent.mkdir(parents=True, exist_ok=True)
        _link(folder / f"pack-{repository['pack']}.pack", pack)
        git_output(place, "index-pack", str(pack))  # computes the hash of every object
        with (place / ".git" / "shallow").open("a", encoding="utf-8") as shallow:
            shallow.write(f"{repository['commit']}\n")
        git_output(place, "cat-file", "-e", f"{repository['commit']}^{{tree}}")
    for content in _files(folder / _LFS):
        place = clone / ".git" / "lfs" / "objects" / content.relative_to(folder / _LFS)
        place.parent.mkdir(parents=True, exist_ok=True)
        _link(content, place)


def _link(source: Path, place: Path) -> None:
    if place.exists():
        return
    try:
        os.link(source, place)
    except OSError:  # another file system
        shutil.copyfile(source, place)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())

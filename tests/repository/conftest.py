"""Repositories of others."""

from __future__ import annotations

import pytest

FILE = "flexq-bench.toml"
TOML = 'version = 1\nname = "Acme_Kernels"\nkernels = ["fast.py"]\nsuite = "smoke"\n'
KERNEL = "from flexq_bench.api import linear_kernel\n"


class Made:
    """A repository of somebody else."""

    def __init__(self, path, git):
        self.path, self._git = path, git

    def git(self, *arguments):
        return self._git(self.path, *arguments)

    def commit(self, **files):
        for name, text in files.items():
            (self.path / name.replace("_toml", ".toml").replace("_py", ".py")).write_text(text)
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", "a change")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def made(tmp_path, git):
    path = tmp_path / "theirs"
    path.mkdir()
    repository = Made(path, git)
    repository.git("init", "-q", "-b", "main")
    (path / FILE).write_text(TOML)
    repository.commit(fast_py=KERNEL)
    return repository

"""Gates of projects: builds in a sandbox, and no gate without one."""

from __future__ import annotations

import socket
import sys
from functools import partial

import pytest

from flexq_bench.measure import sandbox
from flexq_bench.measure.ab import compare_judged_project
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.sandbox import KINDS, SandboxError, building, obstacle, required_kind
from flexq_bench.repository.project import FILE, open_project, revision
from flexq_bench.repository.project_builds import BuildError, built_tree

TOML = 'version = 1\nname = "acme"\nkernels = ["k.py"]\nsuite = "smoke"\n'
WORKING = [kind for kind in KINDS if not obstacle(kind)]
needs_sandbox = pytest.mark.skipif(not WORKING, reason="this machine allows no sandbox")


@pytest.fixture
def built(repository, tmp_path):
    """built("echo x > y", "network = true"): the tree of a commit with this build."""

    def build(command: str, *more: str):
        (repository.path / "k.py").touch()
        build = "\n".join(["[build]", f"command = '''{command}'''", *more])
        (repository.path / FILE).write_text(f"{TOML}{build}\n")
        repository.git("add", "--all")
        repository.git("commit", "-q", "-m", "build")
        project = open_project(str(repository.path))
        with clean_environment() as variables:
            commit = revision(project, "HEAD").checkout
            isolated = partial(building, variables, WORKING[0])
            tree = built_tree(project, commit, variables=variables, isolated=isolated)
            return {path.name: path.read_text() for path in tree.folder.iterdir() if path.is_file()}

    return build


@needs_sandbox
def test_build_writes_only_to_its_own_folder(built, tmp_path):
    with pytest.raises(BuildError):
        built(f"echo 1 > {tmp_path}/elsewhere")

    assert built("echo 1 > made")["made"] == "1\n"
    assert not (tmp_path / "elsewhere").exists()


@needs_sandbox
def test_build_has_no_network_unless_base_allows_it(built):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f'import socket; socket.create_connection(("127.0.0.1", {port}), 5)'
        call = f"{sys.executable} -c '{code}'"
        with pytest.raises(BuildError, match="network = true"):
            built(call)
        built(call, "network = true")


def test_gate_without_a_sandbox_is_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "obstacle", lambda kind: f"{kind} is not permitted")

    with pytest.raises(SandboxError, match="--no-sandbox"):
        required_kind()
    with pytest.raises(SandboxError, match="namespaces is not permitted"):
        list(compare_judged_project(None, None, None, []))

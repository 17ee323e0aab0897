"""Projects: their file, commits and builds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from flexq_bench.errors import UsageError
from flexq_bench.measure.clean_environment import clean_environment
from flexq_bench.measure.program import program_root
from flexq_bench.repository import project_files
from flexq_bench.repository.project import (
    FILE,
    open_project,
    project_notes,
    revision,
)
from flexq_bench.repository.project_builds import BuildError, built_tree
from flexq_bench.repository.project_files import (
    SUITE,
    default_install,
    missing_kernels,
    write_first_files,
)
from flexq_bench.repository.worktrees import commits_after
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.suites import load_suite

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bring-your-own.md"
TOML = 'version = 1\nname = "Acme_Kernels"\nkernels = ["fast.py"]\nsuite = "smoke"\n'
INSTALL = "flexq-bench @ git+https://example.org/flexq-bench@v2.0.0"
KERNEL = "from flexq_bench.api import linear_kernel\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def with_build(made, command, **build):
    more = "".join(f"{key} = {value}\n" for key, value in build.items())
    (made.path / FILE).write_text(f'{TOML}[build]\ncommand = "{command}"\n{more}')
    return made.commit()


def test_tree_is_built_once_for_all_its_commits(made, tmp_path):
    first = with_build(made, f"echo built >> {tmp_path}/log; echo 1 > made")
    second = made.commit()
    third = made.commit(other_py="")
    project = open_project(str(made.path))

    folders = [built_tree(project.at(sha), sha).folder for sha in (first, second, third)]

    assert folders[0] == folders[1] != folders[2]
    assert (tmp_path / "log").read_text().split() == ["built", "built"]
    assert (folders[0] / "made").read_text() == "1\n"
    assert made.git("status", "--porcelain") == ""
    assert len(made.git("worktree", "list").splitlines()) == 1


def test_build_of_unreviewed_code_leaves_nothing_for_later_runs(made, cache):
    sha = made.commit(other_py="")
    project = open_project(str(made.path))

    with clean_environment() as variables:
        folder = built_tree(project, sha, variables=variables).folder
        (folder / "fast.py").write_text("# changed while it ran\n")

    assert not folder.exists()
    assert (built_tree(project, sha).folder / "fast.py").read_text() == KERNEL


def test_failed_build_is_one_line_and_retried(made, tmp_path):
    sha = with_build(made, f"test -e {tmp_path}/there || (echo no; echo 'not there'; exit 3)")
    project = open_project(str(made.path))

    with pytest.raises(BuildError, match=f"^{sha[:10]} does not build: not there ") as raised:
        built_tree(project, sha)
    output = re.search(r"\(its output: (.*)\)", str(raised.value))[1]
    assert Path(output).read_text() == "no\nnot there\n"
    (tmp_path / "there").touch()

    assert built_tree(project, sha).folder.is_dir()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (
            "g++ -c a.cpp\na.cpp:3:1: error: no such type\na.cpp:9:1: error: more\n"
            "make: *** [Makefile:2: all] Error 1",
            "a.cpp:3:1: error: no such type",
        ),
        (
            "  error: subprocess-exited-with-error\n  × Building wheel did not run\n"
            "      LookupError: no version\n      [end of output]\n  note: not of pip",
            "LookupError: no version",
        ),
        ("make: *** No rule to make target", "make: *** No rule to make target"),
    ],
)
def test_failed_build_names_its_reason(made, tmp_path, output, reason):
    (tmp_path / "output").write_text(output)
    sha = with_build(made, f"cat {tmp_path}/output; exit 1")

    with pytest.raises(BuildError, match=re.escape(f"does not build: {reason} (")):
        built_tree(open_project(str(made.path)), sha)


def test_project_in_a_subfolder_is_built_there(made):
    inside = made.path / "gemm" / "fast"
    (inside / "src").mkdir(parents=True)
    build = '[build]\ncommand = "pwd > made"\n'
    (inside / FILE).write_text(TOML.replace("Acme_Kernels", "Inner") + build)
    (inside / "fast.py").write_text(KERNEL)
    base = made.commit()
    (inside / FILE).write_text((inside / FILE).read_text() + "# edited\n")
    sha = made.commit()

    project = open_project(str(inside / "src"))  # the nearest folder with a file counts

    built = built_tree(project.at(sha), sha)
    assert project.name == "inner"
    assert (built.folder / "made").read_text() == f"{built.folder}\n"
    assert built.sources[0].place == str(built.folder / "fast.py")
    assert project_notes(project, base, sha) == (
        "not judged: gemm/fast/flexq-bench.toml changed by head; base's are used",
    )
    assert open_project(str(made.path / "gemm")).name == "acme-kernels"


def test_submodules_are_built_at_their_commits(made, tmp_path, git, caplog):
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q", "-b", "main")
    shas = []
    for text in ("first", "second"):
        (library / "scales.py").write_text(text)
        git(library, "add", "--all")
        git(library, "commit", "-q", "-m", text)
        if not shas:
            local = ("-c", "protocol.file.allow=always")
            made.git(*local, "submodule", "--quiet", "add", str(library), "deps/library")
        else:
            git(made.path / "deps" / "library", "pull", "-q")
        shas.append(made.commit())
    project = open_project(str(made.path))

    folders = [built_tree(project, sha).folder for sha in shas]

    assert [(one / "deps/library/scales.py").read_text() for one in folders] == ["first", "second"]
    made.git("submodule", "--quiet", "deinit", "--force", "--all")
    without = built_tree(project, shas[1]).folder
    assert without not in folders  # what lacks files is no build of that commit
    assert "the submodule deps/library is not in this clone" in caplog.text


def test_lfs_files_come_from_the_clone(made, caplog):
    oids = [digit * 64 for digit in "ab"]
    for oid in oids:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 6\n"
        (made.path / f"ü table {oid[0]}.bin").write_text(pointer)
    stored = made.path / ".git" / "lfs" / "objects" / "aa" / "aa" / oids[0]
    stored.parent.mkdir(parents=True)
    stored.write_bytes(b"table\0")
    sha = made.commit()
    project = open_project(str(made.path))

    folder = built_tree(project, sha).folder

    assert (folder / "ü table a.bin").read_bytes() == b"table\0"
    said = f"{sha[:10]}: ü table b.bin is a pointer of git-lfs, whose file is not in this clone"
    assert [line for line in caplog.messages if "git-lfs" in line] == [
        f"{said}: git lfs fetch --all"
    ]
    later = stored.parents[2] / "bb" / "bb" / oids[1]
    later.parent.mkdir(parents=True)
    later.write_bytes(b"fetched")
    assert (built_tree(project, sha).folder / "ü table b.bin").read_bytes() == b"fetched"


def test_missing_uv_is_reported(made, tmp_path, monkeypatch):
    sha = with_build(made, "true", environment='"uv"', packages='["einops"]')
    project = open_project(str(made.path))
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(programs))

    with pytest.raises(BuildError, match="does not build: uv: No such file or directory: pip inst"):
        built_tree(project, sha)


def test_a_build_that_hangs_is_ended(made):
    sha = with_build(made, "sleep 60", timeout_s=0.2)

    with pytest.raises(BuildError, match=r"does not build in 0\.2 s"):
        built_tree(open_project(str(made.path)), sha)


@pytest.mark.parametrize("output", [">/dev/null 2>&1", ""])  # or that of the build
def test_processes_of_a_build_end_with_it(made, tmp_path, eventually, output):
    told = tmp_path / "told"
    command = f"setsid sleep 600 {output} & echo $! > {told}; sleep 0.5"
    sha = with_build(made, command, timeout_s=30)

    built_tree(open_project(str(made.path)), sha)

    status = Path(f"/proc/{told.read_text().strip()}/cmdline")
    # What ended has no command line.
    eventually(lambda: not status.exists() or not status.read_bytes())


def test_kernels_of_a_built_tree_have_the_project_prefix(made):
    sha = made.git("rev-parse", "HEAD")
    built = built_tree(open_project(str(made.path)), sha)

    (built.folder / "src").mkdir()
    (source,) = built.sources
    assert source.prefix == "acme-kernels"
    assert source.place == str(built.folder / "fast.py")
    paths = built.environment({"PYTHONPATH": "/theirs"})["PYTHONPATH"].split(":")
    assert paths == [str(built.folder), str(built.folder / "src"), "/theirs"]


def test_working_tree_with_changes_is_a_dirty_revision(made):
    project = open_project(str(made.path))
    (made.path / "fast.py").write_text(KERNEL + "# edited\n")

    found = revision(project, ".")

    assert (found.commit.dirty, found.commit.project) == (True, "acme-kernels")
    assert found.commit.sha == made.git("rev-parse", "HEAD")
    built = built_tree(project, found.checkout)
    assert (built.folder / "fast.py").read_text().endswith("# edited\n")


def test_bare_repository_is_refused(made, tmp_path, git):
    git(tmp_path, "clone", "-q", "--bare", str(made.path), "bare ü.git")

    with pytest.raises(UsageError, match=r"is a bare repository.* worktree add FOLDER"):
        open_project(str(tmp_path / "bare ü.git"))


def test_repository_of_another_user_is_refused(made, monkeypatch):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")

    with pytest.raises(UsageError, match="whose owner is another user: git config --global --add"):
        open_project(str(made.path))


def test_ancestry_in_a_shallow_clone_is_refused(made, tmp_path, git):
    made.commit()
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{made.path}", "shallow")
    made.git("checkout", "-q", "--orphan", "other")
    other = made.commit()
    project = open_project(str(tmp_path / "shallow"))
    git(tmp_path / "shallow", "fetch", "-q", "--depth", "1", "origin", "other:other")

    with pytest.raises(UsageError, match="git fetch --unshallow first"):
        commits_after(project.root, other, "main")


def test_project_file_is_read_from_each_commit(made):
    before = made.git("rev-parse", "HEAD")
    made.commit(**{"flexq-bench_toml": TOML.replace("smoke", "nightly")})
    project = open_project(str(made.path))

    assert project.file.suite == "nightly"
    assert project.at(before).file.suite == "smoke"
    assert project_notes(project, before, "HEAD") == (
        "not judged: flexq-bench.toml changed by head; base's are used",
    )


def test_changes_of_deciding_files_by_head_are_reported(made):
    text = TOML.replace('"smoke"', '"suite.toml"') + 'policy = "policy.toml"\n'
    base = made.commit(**{"flexq-bench_toml": text, "suite_toml": "", "policy_toml": ""})
    made.commit(suite_toml="# fewer shapes\n", policy_toml="# larger limits\n")

    assert project_notes(open_project(str(made.path)), base, "HEAD") == (
        "not judged: policy.toml, suite.toml changed by head; base's are used",
    )


def test_kernel_files_missing_in_head_are_noted(made):
    base = made.git("rev-parse", "HEAD")
    project = open_project(str(made.path))
    (name,) = project.file.kernels
    made.git("mv", name, "renamed.py")
    sha = made.commit(**{"flexq-bench_toml": TOML.replace(name, "renamed.py")})

    *_, lost = project_notes(project, base, sha)
    assert lost == f"{name}, which base's {FILE} names, is not in head; --trust-head takes head's"


def test_kernel_modules_missing_in_head_are_noted(made):
    base = made.commit(**{"flexq-bench_toml": TOML.replace('"fast.py"', '"fast", "json.tool"')})
    project = open_project(str(made.path))
    made.git("mv", "fast.py", "faster.py")

    (lost,) = project_notes(project, base, made.commit())
    assert lost.startswith(f"fast, which base's {FILE} names, is not in head")


def test_commits_after_good_are_first_parents(made):
    good = made.git("rev-parse", "HEAD")
    later = [made.commit(), made.commit()]
    project = open_project(str(made.path))

    assert commits_after(project.root, good, later[-1]) == later
    assert revision(project, "main").checkout == later[-1]
    with pytest.raises(UsageError, match="is not an ancestor"):
        commits_after(project.root, later[-1], good)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TOML.replace("version = 1", "version = 2"), "this flexq-bench reads 1: update"),
        (TOML + 'kernel = "x"\n', "no key 'kernel' here"),
        (TOML.replace('"fast.py"', '"../fast.py"'), r"\.\./fast\.py is not a file of the reposit"),
        (TOML.replace('["fast.py"]', "[]"), "kernels must be a list of strings"),
        (TOML + "[build]\nenvironment = 'conda'\n", "environment must be none, pip or uv"),
    ],
)
def test_malformed_project_file_is_one_line(made, text, said):
    (made.path / FILE).write_text(text)

    with pytest.raises(WorkloadError, match=said):
        open_project(str(made.path))


def test_repository_without_project_file_is_refused(tmp_path, git):
    git(tmp_path, "init", "-q")

    with pytest.raises(UsageError, match=r"has no flexq-bench\.toml: `flexq-bench init"):
        open_project(str(tmp_path))
    with pytest.raises(UsageError, match="'' names nothing"):  # an unset variable
        open_project("")


def test_workflows_install_the_program_from_where_it_is(tmp_path, git, monkeypatch):
    from_index = SimpleNamespace(read_text=lambda name: None)
    monkeypatch.setattr(project_files.metadata, "distribution", lambda name: from_index)
    monkeypatch.setattr(project_files, "package_version", lambda: "2.0.0")
    monkeypatch.setattr(project_files, "ROOT", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--allow-empty", "--quiet", "--message", "first")
    sha = git(tmp_path, "rev-parse", "HEAD").strip()

    assert default_install() == f"flexq-bench @ git+{tmp_path.as_uri()}@{sha}"
    git(tmp_path, "remote", "add", "origin", "git@example.org:acme/bench.git")
    assert default_install() == f"flexq-bench @ git+https://example.org/acme/bench.git@{sha}"
    inside = tmp_path / "venv"  # of another repository, whose URL says nothing of this program
    inside.mkdir()
    monkeypatch.setattr(project_files, "ROOT", inside)
    assert re.fullmatch(r"flexq-bench==\d.*", default_install())
    monkeypatch.setattr(project_files, "ROOT", tmp_path.parent / "no-repository")
    monkeypatch.chdir(tmp_path)  # the folder in which `init` runs says nothing of it either
    assert re.fullmatch(r"flexq-bench==\d.*", default_install())
    origin = json.dumps({"url": tmp_path.as_uri(), "dir_info": {}})  # of `pip install .`
    installed = SimpleNamespace(read_text=lambda name: origin)
    monkeypatch.setattr(project_files.metadata, "distribution", lambda name: installed)
    assert default_install() == f"flexq-bench @ git+https://example.org/acme/bench.git@{sha}"


def test_first_files_name_the_kernels(tmp_path, git):
    git(tmp_path, "init", "-q")
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "other.py").write_text("")
    files = (
        'brück "e.py',  # git quotes it, TOML too
        ".venv/lib/site-packages/flexq_bench/api.py",  # of no kernel
        "tests/test_fast.py",  # nor has a test one of its own
        "kernels/fast.py",
        "src/acme/gemm/fast.py",
        "src/acme/gemm/not-a-module.py",
        "src/spaced/deep/fast.py",  # a package without __init__.py
    )
    for folder in ("kernels", "src/acme", "src/acme/gemm"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(KERNEL)

    write_first_files(tmp_path, INSTALL)

    assert set(open_project(str(tmp_path)).file.kernels) == {
        *("mine.py", files[0], "kernels.fast", "acme.gemm.fast", files[5], "spaced.deep.fast")
    }
    assert (
        'flexq-bench gate perf --project "$GITHUB_WORKSPACE"/. --base'
        in (tmp_path / ".github/workflows/flexq-bench.yml").read_text()
    )
    with pytest.raises(UsageError, match="is there already"):
        write_first_files(tmp_path, INSTALL)


@pytest.mark.parametrize(
    ("files", "command"),
    [
        (("setup.py", "Makefile"), "python setup.py build_ext --inplace"),
        (("Makefile", "CMakeLists.txt"), "make"),
        (("CMakeLists.txt",), "cmake -S . -B build && cmake --build build"),
        ((), "make"),
    ],
)
def test_first_project_file_suggests_a_build_command(tmp_path, git, files, command):
    git(tmp_path, "init", "-q")
    for name in ("mine.py", *files):
        (tmp_path / name).write_text(KERNEL)

    write_first_files(tmp_path, INSTALL)

    assert f'\n# command = "{command}"\n' in (tmp_path / FILE).read_text()


def test_workflow_of_a_subfolder_is_at_the_root(tmp_path, git):
    git(tmp_path, "init", "-q")
    inside = tmp_path / "gemm" / "fast"
    inside.mkdir(parents=True)
    (inside / "mine.py").write_text(KERNEL)
    (tmp_path / "other.py").write_text(KERNEL)

    written = write_first_files(inside, INSTALL)

    workflows = tmp_path / ".github" / "workflows"
    pull_request, nightly = (workflows / f"flexq-bench-fast{name}.yml" for name in ("", "-nightly"))
    assert list(written.texts) == [inside / FILE, inside / SUITE, pull_request, nightly]
    assert open_project(str(inside)).file.kernels == ("mine.py",)
    workflow = pull_request.read_text()
    assert 'flexq-bench gate perf --project "$GITHUB_WORKSPACE"/gemm/fast --base' in workflow
    assert "name: FlexQ Bench (fast)\n" in workflow
    assert missing_kernels(inside) == []
    (inside / "mine.py").unlink()
    assert missing_kernels(inside) == ["mine.py"]


@pytest.mark.parametrize(
    ("formats", "k"), [(["int8/row"], 1024), (["int6/128"], 1024), (["int4/96", "int4/64"], 1152)]
)
def test_first_suite_has_whole_groups_of_the_formats(tmp_path, git, formats, k):
    git(tmp_path, "init", "-q")
    lines = [f'@linear_kernel("a{i}", weight="{f}")' for i, f in enumerate(formats)]
    (tmp_path / "mine.py").write_text(f"{KERNEL}\n" + "".join(f"# {line}\n" for line in lines))

    write_first_files(tmp_path, INSTALL)

    suite = load_suite(str(tmp_path / SUITE))
    assert {(s.n, s.k) for group in suite.groups for s in group.shapes} == {(1024, k)}


def test_workflows_install_from_the_given_source(tmp_path, git):
    git(tmp_path, "init", "-q")
    git(tmp_path, "remote", "add", "origin", "git@example.org:acme/kernels.git")

    files = write_first_files(tmp_path, INSTALL, gpu=True)

    documents = [
        yaml.safe_load(text) for path, text in files.texts.items() if path.suffix == ".yml"
    ]
    assert [document["env"]["FLEXQ_BENCH"] for document in documents] == [INSTALL, INSTALL]
    first_jobs = [next(iter(document["jobs"].values())) for document in documents]
    assert [job["runs-on"] for job in first_jobs] == [["self-hosted", "gpu"]] * 2
    assert files.badge.startswith("[![kernels](https://example.org/acme/kernels/actions/")
    for job in (job for document in documents for job in document["jobs"].values()):
        for step in job["steps"]:
            subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=True)


def test_installed_program_shadows_no_package_of_a_project(tmp_path, cache):
    packages = tmp_path / "site-packages"
    for name in ("flexq_bench", "kernels", "torch"):
        (packages / name).mkdir(parents=True)

    root = program_root(packages)

    assert [link.name for link in root.iterdir()] == ["flexq_bench"]
    assert (root / "flexq_bench").resolve() == packages / "flexq_bench"
    assert program_root(packages) == root


def test_documented_first_gate_has_at_most_40_lines():
    section = PAGE.read_text().split("## From an empty repository to a gated pull request\n")[1]
    blocks = re.findall(r"```\w+\n(.*?)```", section.split("\n## ")[0], re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.strip()]

    assert 5 < len(lines) <= 40


def test_moved_project_is_found_by_name(made):
    """Where it lay before, another project may have come to lie."""
    before = made.git("rev-parse", "HEAD")
    (made.path / "libs" / "of gemms").mkdir(parents=True)
    made.git("mv", FILE, "fast.py", "libs/of gemms")
    (made.path / "other").mkdir()
    (made.path / "other" / FILE).write_text(TOML.replace('name = "', 'name = "another-'))
    after = made.commit()
    moved = open_project(str(made.path / "libs" / "of gemms"))

    assert moved.at(before).inside == Path()
    assert moved.at(before).at(after).inside == Path("libs/of gemms")
    assert moved.at(before).moved_to(after).file == moved.at(before).file
    assert project_notes(moved.at(before), before, after) == ()
    (made.path / "libs" / "of gemms" / FILE).write_text(TOML.replace("smoke", "nightly"))
    assert project_notes(moved.at(before), before, made.commit()) == (
        f"not judged: {FILE}, libs/of gemms/{FILE} changed by head; base's are used",
    )
    with pytest.raises(WorkloadError, match=f"^{before[:10]} has no other/{FILE}: commit it"):
        open_project(str(made.path / "other")).at(before)


def test_builds_have_the_variables_of_the_project_file(made, monkeypatch):
    monkeypatch.setenv("ACME_MODE", "of the shell")
    monkeypatch.setenv("ACME_OTHER", "of the shell")
    text = f'{TOML}[variables]\nACME_MODE = "of the file"\n'
    built = '[build]\ncommand = "echo $ACME_MODE, $ACME_OTHER > said"\n'
    sha = made.commit(**{"flexq-bench_toml": text + built})
    project = open_project(str(made.path))

    with clean_environment() as variables:
        tree = built_tree(project, sha, variables=variables)
        assert (tree.folder / "said").read_text() == "of the file,\n"
        assert tree.environment(variables)["ACME_MODE"] == "of the file"
    tree = built_tree(project, sha)
    assert (tree.folder / "said").read_text() == "of the file, of the shell\n"
    made.commit(**{"flexq-bench_toml": text.replace("of the file", "another") + built})
    again = built_tree(open_project(str(made.path)), sha)
    assert (again.folder / "said").read_text() == "another, of the shell\n"


@pytest.mark.parametrize("name", ["PYTHONPATH", "FLEXQ_BENCH_DB", "A-B", ""])
def test_reserved_or_malformed_variables_are_refused(made, name):
    (made.path / FILE).write_text(f'{TOML}[variables]\n"{name}" = "x"\n')

    with pytest.raises(WorkloadError, match=f"{FILE}: variables: {name} is set by flexq-bench, or"):
        open_project(str(made.path))

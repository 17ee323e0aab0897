"""`--project`: verbs over the commits of the sample repository, with its torch kernels.

Its history is judged with made-up times: a commit's kernel takes as long as its source says, and
everything else runs as usual. The slow tests below run the kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from made_projects import CASE, QUICK, made_repository

from flexq_bench.db.engine import open_database
from flexq_bench.db.outbox import events_to_address
from flexq_bench.measure.external_loader import Loader
from flexq_bench.measure.machine_code import projects
from flexq_bench.measure.sandbox import KINDS, obstacle


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    return made_repository(tmp_path_factory.mktemp("theirs") / "acme", (100, 50))


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """The sample as it is published: 10 % and 3 % slower."""
    return made_repository(tmp_path_factory.mktemp("seeded") / "acme", (10, 3))


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_folder_without_project_is_usage_error(cli, tmp_path):
    ran = cli("run", "--project", str(tmp_path))

    assert ran.code == 2
    assert "is not in a git repository" in ran.error


@pytest.mark.parametrize(
    ("build", "has_hint"), [("", True), ('[build]\ncommand = "true"\n', False)]
)
def test_unloadable_kernels_without_build_command_get_hint(cli, tmp_path, git, build, has_hint):
    git(tmp_path, "init", "-q")
    (tmp_path / "mine.py").write_text("import no_such_extension")
    named = 'version = 1\nname = "acme"\nkernels = ["mine.py"]\nsuite = "smoke"\n'
    (tmp_path / "flexq-bench.toml").write_text(named + build)
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "-q", "-m", "kernels")

    ran = cli("run", "--project", str(tmp_path), "--backend", "cpu")

    assert ran.code == 4
    assert "No module named 'no_such_extension'" in ran.error
    assert ("nothing was built: [build] in flexq-bench.toml" in ran.error) is has_hint


def test_kernels_from_and_project_exclude_each_other(cli, acme):
    ran = cli("run", "--project", acme, "--kernels-from", "json")

    assert ran.code == 2
    assert "--kernels-from and --project don't go together" in ran.err


@pytest.mark.slow
def test_compare_lacks_results_of_source_that_does_not_load(
    cli, acme, compared, tmp_path, git, monkeypatch
):
    def compare(project, base, head, cases, **_):
        return [replace(compared(case.kernel), case=case) for case in cases]

    monkeypatch.setattr("flexq_bench.measure.ab.compare_project", compare)
    root = tmp_path / "theirs"
    git(tmp_path, "clone", "-q", acme, str(root))
    listed = root / "flexq-bench.toml"
    text = listed.read_text()
    listed.write_text(text.replace('_kernels.py"]', '_kernels.py", "broken.py"]', 1))
    (root / "broken.py").write_text("import no_such_extension")
    git(root, "add", "--all")
    git(root, "commit", "-q", "-m", "broken")

    ran = cli("compare", "HEAD", "HEAD", "--project", str(root), *QUICK)

    assert "no_such_extension" in ran.err
    assert ran.code == 4, ran.err


def test_broken_build_has_its_exit_code(cli, acme):
    ran = cli(
        *("compare", "build-break", "builds-again", "--project", acme, "--backend", "cpu"),
    )

    assert ran.code == 5
    assert "does not build: " in ran.error


@pytest.mark.usefixtures("made_times")
@pytest.mark.parametrize(
    ("good", "bad", "suspect"),
    [
        pytest.param("slower~10", "fast-again~1", "slower", marks=pytest.mark.slow),
        # Across a wrong result, which has no speed, and a build that breaks.
        ("fast-again", "main", "slightly-slower"),
    ],
)
def test_bisect_of_project_names_each_slower_commit(cli, seeded, git, good, bad, suspect):
    ran = cli("bisect", CASE, "--good", good, "--bad", bad, "--project", seeded, *QUICK, "--json")

    assert ran.code == 1, ran.err
    assert json.loads(ran.out)["suspects"] == [git(Path(seeded), "rev-parse", suspect)]


@pytest.mark.usefixtures("made_times")
@pytest.mark.parametrize(
    ("head", "code", "outcomes"),
    [
        # Bisections above find it as well.
        pytest.param("slower", 1, {"regression"}, marks=pytest.mark.slow),
        pytest.param("slightly-slower", 1, {"regression"}, marks=pytest.mark.slow),
        pytest.param("wrong-result", 1, {"regression", "pass"}, marks=pytest.mark.slow),
        pytest.param("fast-again", 0, {"pass"}, marks=pytest.mark.slow),
        pytest.param("right-again", 0, {"pass"}, marks=pytest.mark.slow),  # base is wrong
        ("slightly-slower~1", 0, {"pass"}),
    ],
)
def test_gate_fails_for_seeded_commits_only(cli, seeded, tmp_path, head, code, outcomes):
    report = tmp_path / "gate.json"
    ran = cli(
        *("gate", "perf", "--project", seeded, "--base", f"{head}~1", "--head", head),
        *("--device", "cpu", "--json", str(report)),
    )

    assert ran.code == code, ran.err
    assert {case["outcome"] for case in json.loads(report.read_text())["cases"]} == outcomes


@pytest.mark.usefixtures("made_times")
def test_gate_refuses_working_tree_with_changes(cli, seeded, git):
    source = Path(seeded) / "kernels" / "torch_kernels.py"
    source.write_text(source.read_text() + "# edited\n")
    try:
        ran = cli("gate", "perf", "--project", seeded, "--base", "main", "--head", ".")
    finally:
        git(Path(seeded), "checkout", "-q", "--", ".")

    assert ran.code == 2
    assert "has local changes, and a gate judges commits" in ran.error


STATIC = """
from flexq_bench.api import compile_cuda, linear_kernel

SOURCE = r'''
extern "C" __global__ void product(float* y, int n) {
  float held[256];
  for (int i = 0; i < 256; ++i) held[i] = y[i * i];
  for (int i = 0; i < n; ++i) held[STEP] += y[i];
  y[n] = held[3];
}
'''


@linear_kernel(
    "fast",
    weight="fp16",
    backends=["cuda"],
    machine_code=lambda target: compile_cuda(SOURCE, target),
)
def fast(x, w, out):
    out.copy_(x @ w.T)
"""


class InThisProcess(Loader):
    """In place of the process that imports a commit's kernels."""

    def __init__(self, *given, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def ask(self, what, **arguments):
        return getattr(self, what)(**arguments)


@pytest.mark.usefixtures("toolchain")
def test_static_gate_compares_machine_code_of_project(cli, tmp_path, git, monkeypatch):
    monkeypatch.setattr(projects, "WorkerProcess", InThisProcess)
    root, report = tmp_path / "theirs", tmp_path / "static.json"
    root.mkdir()
    git(root, "init", "-q")
    (root / "flexq-bench.toml").write_text(
        'version = 1\nname = "acme"\nkernels = ["mine.py"]\nsuite = "smoke"\n'
    )
    # A place that is not known before it runs lies in local memory; one that can't be compiled.
    for tag, step in (("base", "3"), ("same", "3 "), ("spills", "i % 256"), ("breaks", "nothing")):
        (root / "mine.py").write_text(STATIC.replace("STEP", step))
        git(root, "add", "--all")
        git(root, "commit", "-q", "--allow-empty", "-m", tag)
        git(root, "tag", tag)

    def gate(head, *more):
        static = ("gate", "static", "--project", str(root), "--base", "base", "--head", head)
        return cli(*static, "--targets", "sm_90", "--json", str(report), *more)

    assert gate("same").code == 0
    spills = gate("spills")
    assert spills.code == 1, spills.err
    assert "acme.fast" in spills.out
    assert gate("breaks").code == 4
    unknown = gate("breaks", "--kernels", "acme.slow")
    assert (unknown.code, "there is acme.fast" in unknown.error) == (2, True)


@pytest.mark.usefixtures("made_times")
def test_night_in_shallow_clone_advises_fetch(cli, seeded, tmp_path, git):
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{seeded}", "clone ü")

    ran = cli("nightly", "--project", str(tmp_path / "clone ü"), "--backend", "cpu")

    assert ran.code == 0
    assert "is a shallow clone: commits whose ancestry is not known are ordered by" in ran.err
    assert ran.err.count("git fetch --unshallow") == 1


@pytest.mark.usefixtures("made_times")
def test_equal_project_names_of_two_repositories_are_reported(cli, acme, seeded):
    nights = [
        cli("nightly", "--project", folder, "--backend", "cpu", "--night", name)
        for folder, name in ((acme, "1"), (acme, "2"), (seeded, "3"))
    ]

    assert [ran.code for ran in nights] == [0, 0, 0]
    assert [ran.err.count("give this one another name") for ran in nights] == [0, 0, 1]


@pytest.mark.usefixtures("made_times")
@pytest.mark.slow
def test_unmeasurable_commit_of_project_is_notified_once(cli, git, tmp_path, database):
    root = tmp_path / "theirs"
    root.mkdir()
    git(root, "init", "-q", "-b", "master")
    kernel = """# PADDING_PERCENT = 0
from flexq_bench.api import linear_kernel


@linear_kernel("dense", weight="fp16")
def dense(x, w, out): ...
"""
    (root / "fine.py").write_text(kernel)
    (root / "breaks.py").write_text("import no_such_thing")
    toml = 'version = 1\nname = "Acme"\nsuite = "smoke"\n'
    both, broken = 'kernels = ["fine.py", "breaks.py"]\n', 'kernels = ["breaks.py"]\n'
    codes = []
    for text in (toml, toml + "kernels = fine.py", toml + broken, toml + both):
        (root / "flexq-bench.toml").write_text(text)
        git(root, "add", "--all")
        git(root, "commit", "-q", "--allow-empty", "-m", "a change")
        night = ("nightly", "--project", str(root), "--backend", "cpu", "--night", "today")
        codes.append([cli(*night).code for _ in range(2 if text == toml else 1)])
    (root / "flexq-bench.toml").unlink()
    codes.append([cli(*night).code])  # what is no project is wrong usage

    assert codes == [[2, 2], [2], [4], [4], [2]]
    with open_database(str(database)) as opened, opened.session() as session:
        events = [event for _, event in events_to_address(session) if event.kind == "nightly"]
    messages = [(event.subject, event.body.splitlines()[0]) for event in events]
    assert [subject for subject, _ in messages] == [
        *["Night today (acme) is broken"] * 3,
        "Night today (acme.smoke) is without 1 file of kernels, which did not load",
    ]
    reasons = ("kernels is missing", "line 4", *["No module named 'no_such_thing'"] * 2)
    assert all(why in line for why, (_, line) in zip(reasons, messages, strict=True)), messages
    assert events[0].body.endswith("repair the commit: the next night measures it")


@pytest.mark.slow  # 30 nights
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("made_times")
def test_nights_over_history_alert_for_seeded_commits_only(cli, seeded, git, database):
    root, codes = Path(seeded), {}
    shas = git(root, "rev-list", "--reverse", "main").splitlines()
    tags = {git(root, "rev-parse", tag): tag for tag in git(root, "tag").splitlines()}
    for number, sha in enumerate(shas, start=1):
        git(root, "checkout", "-q", sha)
        ran = cli(
            *("nightly", "--project", seeded, "--night", f"2026-01-{number:02}"),
            *("--backend", "cpu"),
        )
        if ran.code:
            codes[tags.get(sha, str(number))] = ran.code
    git(root, "checkout", "-q", "main")

    alerts = json.loads(cli("alerts", "list", "--state", "all", "--json").out)
    assert codes == {"slower": 1, "wrong-result": 1, "build-break": 5, "slightly-slower": 1}
    assert {(tags[alert["bad"]["sha"]], alert["state"]) for alert in alerts} == {
        ("slower", "fixed"),
        ("slightly-slower", "new"),
    }
    with open_database(str(database)) as opened, opened.session() as session:
        messages = Counter(event.kind for _, event in events_to_address(session))
    # One alert is fixed. A wrong result is told at once, and by its night; a night that does not
    # build has no digest.
    assert messages == {"alert": 3, "nightly": 3, "digest": 29}


@pytest.mark.slow
def test_project_results_have_its_name_and_commit(cli, acme, git):
    ran = cli("run", "--project", acme, "--backend", "cpu", "--json", "-")

    records = [json.loads(line) for line in ran.out.splitlines()]
    (mine,) = [record for record in records if record["kernel"] == "acme.torch-w4a16"]
    assert ran.code == 0
    assert (mine["project"], mine["status"]) == ("acme", "ok")
    assert mine["commit"] == git(Path(acme), "rev-parse", "HEAD")
    assert mine["run_info"]["suite"] == "acme.suite"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "verdict", "code"), [("wrong-result", "incorrect", 1), ("change-12", "same", 0)]
)
def test_compare_of_project_judges_commits(cli, acme, git, head, verdict, code):
    if head == "change-12":
        head = git(Path(acme), "rev-parse", "slower~2")

    ran = cli(
        *("compare", f"{head}~1", head, "--project", acme, *QUICK),
        *("--kernels", "acme.torch-w6a8", "--json"),
    )

    (case,) = json.loads(ran.out)["cases"]
    assert case["verdict"] in (verdict, "ambiguous" if verdict == "same" else verdict)
    assert ran.code in (code, 3 if verdict == "same" else code)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gate_judges_wrong_head_by_project_file_of_base(cli, acme, tmp_path):
    report = tmp_path / "gate.json"
    ran = cli(
        *("gate", "perf", "--project", acme, "--base", "wrong-result~1", "--head", "wrong-result"),
        *("--device", "cpu", "--json", str(report)),
    )

    assert ran.code == 1, ran.err
    findings = json.loads(report.read_text())["cases"]
    wrong = [finding for finding in findings if finding["outcome"] == "regression"]
    assert [finding["case"] for finding in wrong] == [CASE]  # the other kernel has no SIGN
    assert {finding["owner"] for finding in findings} == {"acme-kernels"}


@pytest.mark.slow
@pytest.mark.skipif(all(map(obstacle, KINDS)), reason="a gate needs a sandbox")
def test_gate_runs_nothing_of_a_checkout_outside_its_sandbox(tmp_path, git):
    """What Python, git, pip or a shell would run of the folder that they are called in."""
    acme, marks = Path(made_repository(tmp_path / "acme", (100, 50))), tmp_path / "marks"
    marks.mkdir()
    git(acme, "checkout", "-q", "-b", "evil", "slower~1")
    for name in ("sitecustomize", "usercustomize", "conftest", "setup", "pip", "git", "readline"):
        path = str(marks / name)
        mark = f"try:\n    open({path!r}, 'w').close()\nexcept OSError:\n    pass\n"
        (acme / f"{name}.py").write_text(mark)
    for name in ("git", "python", "sh", "nvcc", "gcc", "bwrap"):
        (acme / name).write_text(f"#!/bin/sh\n: > {marks / name}\n")
        (acme / name).chmod(0o755)
    (acme / "evil.pth").write_text("import sitecustomize\n")
    (acme / "evil-1.dist-info").mkdir()
    (acme / "evil-1.dist-info" / "METADATA").write_text("Name: evil\nVersion: 1\n")
    (acme / ".gitattributes").write_text("* filter=evil diff=evil export-subst\n")
    with (acme / "kernels" / "torch_kernels.py").open("a") as source:
        source.write("UNUSED = 0\n")
    git(acme, "add", "--all", "--force")
    git(acme, "commit", "-q", "-m", "evil")

    program = Path(sys.executable).with_name("flexq-bench")
    refs = ("--base", "slower~1", "--head", "evil", "--project", ".")
    ran = subprocess.run(
        [program, "gate", "perf", *refs, "--device", "cpu", "--budget", "1s"],
        cwd=acme,
        env={**os.environ, "FLEXQ_BENCH_DB": str(tmp_path / "gates.sqlite")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 3, ran.stderr
    assert "the budget of 1 s ended" in " ".join(ran.stdout.split())
    assert not list(marks.iterdir())


OVERWRITES = """
import pathlib
for _other in pathlib.Path({cache!r}).rglob("torch_kernels.py"):
    try:
        _other.write_bytes(pathlib.Path(__file__).read_bytes())
    except OSError:
        pass
"""


@pytest.mark.slow
@pytest.mark.skipif(all(map(obstacle, KINDS)), reason="a gate needs a sandbox")
@pytest.mark.parametrize("options", [(), ("--no-sandbox",)], ids=["sandbox", "none"])
def test_slower_head_that_overwrites_base_does_not_pass(cli, tmp_path, git, options):
    acme = Path(made_repository(tmp_path / "acme", (200, 100)))
    git(acme, "checkout", "-q", "-b", "evil", "slower")
    with (acme / "kernels" / "torch_kernels.py").open("a") as source:
        source.write(OVERWRITES.format(cache=os.environ["FLEXQ_BENCH_CACHE"]))
    git(acme, "commit", "-q", "-a", "-m", "evil")

    ran = cli(
        *("gate", "perf", "--project", str(acme), "--base", "slower~1", "--head", "evil"),
        *("--device", "cpu", *options),
    )

    assert ran.code == 1, ran.out + ran.err

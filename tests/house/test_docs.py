"""The documentation and the code say the same."""

from __future__ import annotations

import re
from functools import reduce
from pathlib import Path

import pytest
import typer.main

from db.records import STATUSES
from db.tables import Base
from flexq_bench.cli.app import app
from flexq_bench.exit_codes import ExitCode
from flexq_bench.measure import PROTOCOL_CPU, PROTOCOL_CUDA
from workloads.suites import read_suite

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PROTOCOL = ROOT / "docs" / "protocol.md"
DATABASE = ROOT / "docs" / "database.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = "flexq_bench|kernels|workloads|db|dashboard|ci|tests|docs|benchmarks|examples"

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)


def commands(command=None, name=()):
    """Words of every verb: ("run",), ("db", "upgrade"), …"""
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        return {name}
    return {
        words for verb, sub in command.commands.items() for words in commands(sub, (*name, verb))
    }


def section(page, title):
    return page.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


@every_page
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


@every_page
def test_paths_in_the_text_are_there(page):
    named = re.findall(
        rf"(?:^|[ `])((?:{ROOMS})/[a-z0-9_./-]*)(?=[`\s]|::)", page.read_text(), re.M
    )

    assert [path for path in named if not (ROOT / path).exists()] == []


@every_page
def test_tests_in_the_text_are_there(page):
    named = set(re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", page.read_text()))

    assert [
        f"{file}::{test}"
        for file, test in sorted(named)
        if f"\ndef {test}(" not in (ROOT / file).read_text()
    ] == []


@every_page
def test_commands_in_the_text_are_verbs_of_the_program(page):
    known = commands()
    written = re.findall(
        r"flexq(?:-bench|_bench\.cli) ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", page.read_text()
    )

    assert [words for words in written if not known & {words[:1], words}] == []


@every_page
def test_options_in_the_text_are_options_of_the_verb(page):
    verbs = typer.main.get_command(app).commands
    lines = re.findall(
        r"^(?:flexq-bench|python3 -m flexq_bench\.cli) (.+)$", page.read_text(), re.M
    )
    unknown = []
    for line in lines:
        verb, *rest = line.partition("#")[0].split()
        has_verbs = hasattr(verbs[verb], "commands")
        command = verbs[verb].commands[rest[0]] if has_verbs else verbs[verb]
        options = {name for parameter in command.params for name in parameter.opts}
        unknown += [word for word in rest if word.startswith("--") and word not in options]

    assert unknown == []


@every_page
def test_make_targets_in_the_text_are_in_the_makefile(page):
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.M)

    assert set(named) - set(targets) == set()


def test_protocol_table_holds_the_protocol_s_numbers():
    rows = re.findall(r"^\| `([a-z_.0-9]+)` \| ([\d.]+) \| ([\d.]+) \|", PROTOCOL.read_text(), re.M)
    for field, cuda, cpu in rows:
        for protocol, written in ((PROTOCOL_CUDA, cuda), (PROTOCOL_CPU, cpu)):
            value = reduce(getattr, field.split("."), protocol)
            assert float(written) == value, field

    assert len(rows) > 10
    assert f"This is version {PROTOCOL_CUDA.version} of the protocol" in PROTOCOL.read_text()


def test_every_table_of_the_database_is_explained():
    explained = set(re.findall(r"`([a-z_]+)`", section(DATABASE, "Tables")))

    assert set(Base.metadata.tables) - explained == set()


def test_every_benchmark_is_named_by_a_page_or_used_by_another_benchmark():
    files = [path for path in (ROOT / "benchmarks").rglob("*.*") if path.suffix in (".py", ".toml")]
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "examples" / "README.md"])

    unnamed = [
        path.relative_to(ROOT)
        for path in files
        if path.relative_to(ROOT).as_posix() not in text
        and not is_used_beside(path, [other for other in files if other != path])
    ]

    assert len(files) > 30
    assert unnamed == []


def is_used_beside(path, others):
    """Whether a script in the folder of `path` imports it, or names it if it is no module."""
    use = rf"^(from|import) {path.stem}\b" if path.suffix == ".py" else re.escape(f'"{path.name}"')
    return any(
        re.search(use, other.read_text(), re.M) for other in others if other.parent == path.parent
    )


def test_every_status_and_exit_code_is_explained():
    explained = set(re.findall(r"`([a-z]+)`", section(PROTOCOL, "Measurement procedure")))
    codes = {int(n) for n in re.findall(r"(\d) [a-z]", README.read_text().split("Exit codes")[1])}

    assert set(STATUSES) <= explained
    assert set(ExitCode) <= codes


def test_the_example_suite_can_be_loaded(tmp_path):
    (example,) = re.findall(r"```toml\n(.*?)```", section(ARCHITECTURE, "Add a suite"), re.S)
    (tmp_path / "example.toml").write_text(example)

    suite = read_suite(tmp_path / "example.toml")

    assert suite.cases(["flexq-w6a6"])


IDEAS = {
    "the alert rule": "alert_rule.py",
    "the retry policy of a job": "retry_policy.py",
    "FlexQ's quantization formula": "symmetric_quantization.py",
    "the cold-cache rotation": "cold_cache_rotation.py",
    "the choice of a `flexq-imma` configuration": "configuration_choice.py",
    "ending a run, normal or interrupted": "lifecycle.py",
}


def test_each_idea_of_the_table_lives_in_a_file_that_is_there():
    rows = re.findall(
        r"^\| (.+) \| (`.+`) \|$", section(ARCHITECTURE, "Where each concept is implemented"), re.M
    )
    homes = {idea: re.findall(r"`([^`]+)`", files) for idea, files in rows}

    assert [file for files in homes.values() for file in files if not (ROOT / file).is_file()] == []
    assert {idea: Path(homes[idea][0]).name for idea in IDEAS} == IDEAS


def test_every_package_of_the_service_is_in_the_table_of_rooms():
    named = set(re.findall(r"`flexq_bench/([a-z_]+)(?:/|\.py)", section(ARCHITECTURE, "Packages")))
    there = {
        path.stem
        for path in (ROOT / "flexq_bench").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }

    assert there - {"__init__", "__main__"} == named


def test_the_service_is_few_packages_and_few_loose_files():
    service = ROOT / "flexq_bench"

    assert len([path for path in service.iterdir() if (path / "__init__.py").is_file()]) <= 13
    loose = [path.name for path in service.glob("*.py") if not path.name.startswith("__")]
    assert len(loose) <= 5

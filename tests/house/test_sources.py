"""Rules of all source files."""

from __future__ import annotations

import re
import sys
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from flexq_bench.packages import EXTRAS

ROOT = Path(__file__).parents[2]
WRITTEN = {".py", ".cu", ".cuh", ".toml", ".md", ".sh", ".yml", ".yaml", ".cfg", ".css", ".mako"}
NAMELESS = {"Makefile", "run", "find-python", "cuda-extra"}
BUILT = {"build", "dist", "__pycache__"}
SHOWN = {".ci", ".github"}
ROOMS = ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
CUDA_EXTRAS = ("cuda12", "cuda13")
NOT_INSTALLED_WITHOUT_A_GPU = {
    "cupy": ["cupy-cuda12x", "cupy-cuda13x"],
    "nvmath": ["nvmath-python"],
    "triton": ["triton"],
    "bitsandbytes": ["bitsandbytes"],
    "torchao": ["torchao"],
    "humming": ["humming-kernels"],
}
UNPINNED = {"cuda-bindings", "setuptools"}  # follow the driver and Python
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")
# By their texts: syntax trees of all modules take ten seconds.
FIRST_WORD = re.compile(r'^ *r?"""\s*(\w+)', re.M)  # of docstrings, and of texts like them
IMPORTED = re.compile(r"^ *(?:import (\w+)|from (\w+)[\w.]* import )", re.M)
QUESTIONS = {"What", "Whether", "Where", "Which", "When", "Who", "Why", "How", "As", "So", "If"}
SOMEBODY_S_PATH = re.compile(r"(?<![\w.~$}])/(home|work|Users|root)/\w")


def is_ours(path: Path) -> bool:
    folders = path.relative_to(ROOT).parts[:-1]
    hidden = any(folder.startswith(".") for folder in folders[1:])
    return not hidden and not BUILT & set(folders) and not any("egg-info" in f for f in folders)


# Not all of ROOT: a virtual environment has tens of thousands of files.
TOPS = [p for p in ROOT.iterdir() if p.is_file() or p.name[0] != "." or p.name in SHOWN]
FILES = sorted(
    path
    for top in TOPS
    for path in (top.rglob("*") if top.is_dir() else [top])
    if (path.suffix in WRITTEN or path.name in NAMELESS) and path.is_file() and is_ours(path)
)


def matching_lines(pattern):
    texts = {path: text for path in FILES if pattern.search(text := path.read_text())}
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_walk_sees_the_rooms():
    names = {path.relative_to(ROOT).parts[0] for path in FILES}

    assert {"flexq_bench", "kernels", "workloads", "db", "tests", "docs", "Makefile"} <= names


def test_docstrings_begin_with_a_verb_or_a_noun():
    sources = [f for f in FILES if f.suffix == ".py" and f.relative_to(ROOT).parts[0] != "tests"]
    begun = {path: FIRST_WORD.findall(path.read_text()) for path in sources}

    assert sum(map(len, begun.values())) > 5000
    assert [path for path, words in begun.items() if QUESTIONS & {*words}] == []


def test_names_of_tests_have_at_most_ten_words():
    tests = [path.read_text() for path in FILES if path.name.startswith("test_")]
    names = [name for text in tests for name in re.findall(r"^def test_(\w+)", text, re.M)]

    assert [name for name in names if name.count("_") > 9] == []


def test_nothing_is_left_for_later():
    assert matching_lines(UNFINISHED) == []


def test_no_path_of_one_machine():
    assert matching_lines(SOMEBODY_S_PATH) == []


@pytest.fixture
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins_of(file):
    lines = (ROOT / file).read_text().replace("\\\n", " ").splitlines()
    requirements = [Requirement(line.partition(" --")[0]) for line in lines if line[:1] != "#"]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


@pytest.fixture
def pins():
    return pins_of("constraints.txt")


def requirements_of(project, *extras):
    """Requirements of extras, and of the extras of this project that they name."""
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == project["name"]:
                yield from requirements_of(project, *requirement.extras)
            else:
                yield requirement


def imported_modules(room):
    """Top-level names that the modules of a room import, wherever in the file."""
    texts = (path.read_text() for path in (ROOT / room).rglob("*.py"))
    return {"".join(names) for text in texts for names in IMPORTED.findall(text)}


@pytest.fixture(scope="module")
def owners():
    """The distributions of each module, which takes a third of a second to read."""
    return metadata.packages_distributions() | NOT_INSTALLED_WITHOUT_A_GPU


@pytest.mark.parametrize("room", ROOMS)
def test_what_a_room_imports_is_a_declared_dependency(project, owners, room):
    wanted = [*map(Requirement, project["dependencies"]), *requirements_of(project, *EXTRAS)]
    declared = {canonicalize_name(requirement.name) for requirement in wanted}
    foreign = imported_modules(room) - set(sys.stdlib_module_names) - {"flexq_bench"}

    undeclared = {
        module
        for module in foreign
        if not declared & {canonicalize_name(owner) for owner in owners.get(module, [])}
    }

    assert undeclared == set()


def test_every_extra_is_known_to_the_commands(project):
    extras = project["optional-dependencies"].keys()

    assert EXTRAS.keys() == extras - {"all", "test"}
    (everything,) = map(Requirement, project["optional-dependencies"]["all"])
    assert everything.extras == EXTRAS.keys() - {*CUDA_EXTRAS, "peers"}


@pytest.mark.parametrize("extra", EXTRAS)
def test_packages_of_an_extra_bring_its_modules(project, owners, extra):
    names = {canonicalize_name(requirement.name) for requirement in requirements_of(project, extra)}

    for module in EXTRAS[extra]:
        assert names & {canonicalize_name(owner) for owner in owners[module.partition(".")[0]]}


def test_every_dependency_is_pinned_within_its_bounds(project, pins):
    for requirement in [
        *map(Requirement, project["dependencies"]),
        *requirements_of(project, "all", "test"),
    ]:
        name = canonicalize_name(requirement.name)
        if name not in UNPINNED:
            assert requirement.specifier.contains(pins[name]), name


def test_what_a_pinned_package_needs_is_pinned_too(pins):
    unpinned = set()
    for name in pins.keys() - {"torch"}:  # whose needs depend on its build
        with suppress(metadata.PackageNotFoundError):
            for requirement in map(Requirement, metadata.requires(name) or ()):
                wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
                if wanted and canonicalize_name(requirement.name) not in pins:
                    unpinned.add((canonicalize_name(requirement.name), name))

    assert {package for package, _ in unpinned} <= UNPINNED, unpinned


def test_every_pin_but_torch_s_has_a_hash(pins):
    hashed = "constraints-hashes.txt"
    entries = re.split(r"\n(?=[^ #])", (ROOT / hashed).read_text())[1:]

    # Which build of torch fits depends on the driver.
    assert pins_of(hashed) == {name: pin for name, pin in pins.items() if name != "torch"}
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("extra", CUDA_EXTRAS)
def test_no_pin_shuts_a_cuda_version_out(project, pins, extra):
    for requirement in map(Requirement, project["optional-dependencies"][extra]):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is None or requirement.specifier.contains(pin), requirement.name

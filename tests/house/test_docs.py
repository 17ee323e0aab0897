"""The documentation and the code say the same."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import statistics
from functools import cache, reduce
from itertools import pairwise
from pathlib import Path

import pytest
import typer.main

from flexq_bench.cli.app import app
from flexq_bench.db.exchange import read_records
from flexq_bench.db.records import STATUSES
from flexq_bench.db.tables import Base
from flexq_bench.exit_codes import ExitCode
from flexq_bench.kernels.formats import NumberFormat
from flexq_bench.kernels.registry import labels
from flexq_bench.measure import PROTOCOL_CPU, PROTOCOL_CUDA
from flexq_bench.schemes.kernel_choice import kernel_label
from flexq_bench.schemes.registry import resolve as resolve_scheme
from flexq_bench.workloads.patterns import matches_any
from flexq_bench.workloads.suites import read_suite

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PROTOCOL = ROOT / "docs" / "protocol.md"
DATABASE = ROOT / "docs" / "database.md"
LAB = ROOT / "docs" / "lab"
EXAMPLES = ROOT / "examples"
OTHERS = [EXAMPLES / "README.md", ROOT / "ci" / "cluster" / "README.md"]
PAGES = [README, *OTHERS, *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    path
    for room in ("flexq_bench", "kernels", "workloads", "db", "dashboard", "ci")
    for path in (ROOT / room).rglob("*.py")
]
# Names of files that are a user's, another project's, or written by a command.
NOT_OURS = {
    "FILE.py", "flexq-bench.toml", "merges.txt", "my_kernels.py", "nightly.md", "results.parquet",
    "test_cublas_kernel.cu",
}  # fmt: skip
ROOMS = "flexq_bench|kernels|workloads|db|dashboard|ci|tests|docs|benchmarks|examples"

every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix().removeprefix("docs/")
)


@cache
def program():
    return typer.main.get_command(app)


@cache
def commands(command=None, name=()):
    """Words of every verb: ("run",), ("db", "upgrade"), …"""
    command = command or program()
    if not hasattr(command, "commands"):
        return {name}
    return {
        words for verb, sub in command.commands.items() for words in commands(sub, (*name, verb))
    }


def section(page, title):
    return page.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


@every_page
def test_links_lead_to_existing_files(page):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists()] == []


def headings(page):
    """Anchors of a page's headings, as GitHub derives them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@every_page
def test_links_to_headings_lead_to_existing_headings(page):
    links = re.findall(r"\]\((?!https?://)([^)#]*)#([^)]+)\)", page.read_text())

    assert [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in headings(page.parent / file if file else page)
    ] == []


MAX_WORDS = 55_000  # of README.md and docs/, as `wc -w` counts them
MAX_README_WORDS = 1_300


def test_documentation_is_short():
    words = {page: len(page.read_text().split()) for page in PAGES if page not in OTHERS}

    assert LAB / "measuring.md" in words
    assert words[README] < MAX_README_WORDS
    assert sum(words.values()) < MAX_WORDS


@pytest.mark.parametrize("page", sorted(LAB.glob("*.md")), ids=lambda page: page.stem)
def test_lab_page_is_linked_from_a_reference_page(page):
    pages = [path for path in PAGES if LAB not in path.parents]

    assert any(f"lab/{page.name}" in path.read_text() for path in pages)


def test_every_image_is_shown_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    images = [path.name for path in (ROOT / "docs" / "images").iterdir()]

    assert [name for name in images if f"images/{name})" not in text] == []


@cache
def file_names():
    rooms = (path for room in ROOMS.split("|") for path in (ROOT / room).rglob("*.*"))
    return {path.name for path in (*rooms, *ROOT.glob("*.*"))}


@every_page
def test_files_named_in_the_text_exist(page):
    code = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())
    kinds = r"py|cuh?|toml|csv|parquet|json\.gz|jsonl\.gz|yml|md|txt"
    named = {
        Path(name).name
        for part in code
        for name in re.findall(rf"(?:^|(?<=[\s/(]))([\w.-]+\.(?:{kinds}))(?=$|[\s:,)])", part)
    }

    assert named - file_names() - NOT_OURS == set()


@every_page
def test_paths_in_the_text_exist(page):
    named = re.findall(
        rf"(?:^|[ `])((?:{ROOMS})/[a-z0-9_./-]*)(?=[`\s]|::)", page.read_text(), re.M
    )

    assert [path for path in named if not (ROOT / path).exists()] == []


@every_page
def test_tests_named_in_the_text_exist(page):
    named = set(re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", page.read_text()))

    assert [
        f"{file}::{test}"
        for file, test in sorted(named)
        if f"\ndef {test}(" not in (ROOT / file).read_text()
    ] == []


@every_page
def test_commands_in_the_text_are_verbs_of_the_program(page):
    known = {words[:2] for words in commands()}  # of `db token create` these are found in the text
    written = re.findall(
        r"flexq(?:-bench|_bench\.cli) ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", page.read_text()
    )

    assert [words for words in written if not known & {words[:1], words}] == []


def command_lines(page):
    """Words of each command of a page: of its blocks of code, and in the text."""
    text = page.read_text().replace("\\\n", " ")
    blocks = "".join(re.findall(r"^```(?:sh|bash)?\n(.*?)^```", text, re.M | re.S))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = [span.replace("\n", " ") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    lines = [*blocks.splitlines(), *re.findall(r"^    (\S.*)$", prose, re.M), *spans]
    for line in lines:
        line = line.partition(" #")[0].strip()
        if re.match(r"flexq-bench |python3? ", line):
            yield shlex.split(line.replace("…", ""))


def program_commands(page):
    """Each command of the program on a page: its click command and its further words."""
    verbs = program().commands
    for words in command_lines(page):
        rest = words[1:] if words[0] == "flexq-bench" else words[3:]
        ours = words[0] == "flexq-bench" or words[1:3] == ["-m", "flexq_bench"]
        if not ours or rest[0] not in verbs:
            continue
        command = verbs[rest[0]]
        if hasattr(command, "commands"):
            if len(rest) < 2 or rest[1] not in command.commands:
                continue
            command, rest = command.commands[rest[1]], rest[1:]
        yield command, rest[1:]


def options_of(command):
    return {"--help"} | {
        name for option in command.params for name in (*option.opts, *option.secondary_opts)
    }


@every_page
def test_options_in_the_text_are_options_of_the_verb(page):
    assert [
        f"{command.name} {word}"
        for command, rest in program_commands(page)
        for word in rest
        if word.startswith("--") and word.partition("=")[0] not in options_of(command)
    ] == []


@cache
def script_options(script):
    """Options of a script, and of the modules beside it that it imports."""
    text = script.read_text()
    beside = [path for path in script.parent.glob("*.py") if path != script]
    text += "".join(path.read_text() for path in beside if is_used_beside(path, [script]))
    named = re.findall(r"^def ([a-z]+)", text, re.M) if 'f"--{' in text else []
    return {"--help", *re.findall(r"""["'](--[a-z][a-z-]*)["']""", text)} | {
        f"--{name}" for name in named
    }


@every_page
def test_scripts_in_the_text_have_their_options(page):
    unknown = []
    for words in command_lines(page):
        if words[0] not in ("python", "python3") or not words[1].endswith(".py"):
            continue
        script = ROOT / words[1]
        known = script_options(script)
        unknown += [f"{words[1]} {word}" for word in words[2:] if word[:2] == "--" != word
                    and word.partition("=")[0] not in known]  # fmt: skip

    assert unknown == []


@cache
def kernel_labels():
    return [*labels("cuda"), *labels("cpu")]


@every_page
def test_kernels_and_schemes_in_the_text_are_registered(page):
    unknown = []
    for _, rest in program_commands(page):
        for option, value in pairwise(rest):
            names = re.split(r",(?![^\[{]*[\]}])", value)
            if option == "--kernels":
                unknown += [
                    name
                    for name in names
                    if "my-kernels" not in name
                    and "<" not in name
                    and not any(matches_any([name], label) for label in kernel_labels())
                ]
            if option in ("--scheme", "--schemes") and "SCHEME" not in value:
                for name in names:
                    resolve_scheme(name)

    assert unknown == []


def test_commands_in_messages_are_commands_of_the_program():
    verbs = program().commands
    known = commands() | {(verb,) for verb in verbs}
    # After a bracket or a backtick it is a command; elsewhere it may be a name in a sentence.
    command = re.compile(r"[`(]flexq-bench ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?")
    named = [
        (path.relative_to(ROOT).as_posix(), words)
        for path in SOURCES
        for words in command.findall(path.read_text())
    ]

    assert len(named) > 20
    assert [(path, words) for path, words in named if not known & {words[:1], words}] == []


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


def test_every_benchmark_is_named_by_a_page_or_benchmark():
    files = [path for path in (ROOT / "benchmarks").rglob("*.*") if path.suffix in (".py", ".toml")]
    text = "".join(page.read_text() for page in PAGES)

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


# Beginnings of concepts that a newcomer looks for, and something that a file of the row defines.
SOUGHT = {
    "a check of the accuracy gate": "class Check(",
    "the rotation of weights": "def copies_for(",
    "closing and moving alerts": "def judge_open_alerts(",
    "the choice of a configuration": "def choose_config(",
    "the choice without timing": "def default_config(",
    "Ctrl-C": "def open_run(",
    "the retry policy of a job": "def is_quarantined(",
    "FlexQ's quantization formula": "def quantize_symmetric(",
}
MAX_FILES_OPENED = 2  # of a concept; another concept of the row follows a semicolon


def concepts():
    """Files by concept, those of one concept in one list, of the table of architecture.md."""
    rows = re.findall(
        r"^\| (.+) \| (`.+`) \|$", section(ARCHITECTURE, "Where each concept is implemented"), re.M
    )
    return {
        concept: [re.findall(r"`([^`]+)`", part) for part in files.split(";")]
        for concept, files in rows
    }


def test_files_of_each_concept_exist_and_are_few():
    homes = [files for parts in concepts().values() for files in parts]

    assert len(homes) > 25
    assert [file for files in homes for file in files if not (ROOT / file).is_file()] == []
    assert [files for files in homes if len(files) > MAX_FILES_OPENED] == []


@pytest.mark.parametrize(("begin", "code"), SOUGHT.items())
def test_sought_concept_is_defined_in_its_files(begin, code):
    (parts,) = [parts for concept, parts in concepts().items() if concept.startswith(begin)]

    assert any(code in (ROOT / file).read_text() for file in parts[0])


def test_every_package_is_in_the_table_of_rooms():
    named = set(re.findall(r"`flexq_bench/([a-z_]+)(?:/|\.py)", section(ARCHITECTURE, "Packages")))
    there = {
        path.stem
        for path in (ROOT / "flexq_bench").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }

    assert there - {"__init__", "__main__"} == named


def test_the_service_is_few_packages_and_few_loose_files():
    service = ROOT / "flexq_bench"

    assert len([path for path in service.iterdir() if (path / "__init__.py").is_file()]) <= 19
    loose = [path.name for path in service.glob("*.py") if not path.name.startswith("__")]
    assert len(loose) <= 5


def cells(page, title):
    """Rows of the first table of a section, without its head."""
    lines = [line for line in section(page, title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_kernels_for_external_checkpoints_are_those_of_their_layers():
    page = ROOT / "docs" / "external-checkpoints.md"
    checked = 0
    for weights, activation, kernel in cells(page, "Which kernel runs it"):
        if weights.startswith("any"):
            continue
        for weight in re.sub(r"\(.*\)", "", weights).split(","):
            formats = NumberFormat.parse(weight.strip()), NumberFormat.parse(activation)
            assert (kernel_label(*formats) or "none") == kernel.strip(), weight
            checked += 1

    assert checked > 10


def test_every_record_of_the_examples_is_explained():
    text = (EXAMPLES / "README.md").read_text()
    records = [
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.*")
        if path.suffix in (".parquet", ".gz") and path.parts[-2] != "interleave"
    ]

    assert len(records) > 20
    assert [name for name in records if f"`{name}`" not in text] == []


def speedups_by_tokens(path):
    """Of flexq over cuBLASLt W8A8 by tokens, from rows of two_protocols.py."""
    with gzip.open(path, "rt") as rows:
        times = {row["case"]: row["median_us"] for row in map(json.loads, rows)}
    speedups = {}
    for case, time in times.items():
        if case.startswith("flexq "):
            tokens = int(re.search(r" m(\d+)n", case)[1])
            other = times[case.replace("flexq", "cublaslt-w8a8", 1)]
            speedups.setdefault(tokens, []).append(other / time)
    return speedups


def test_figures_of_the_readme_equal_the_records():
    speedups = speedups_by_tokens(EXAMPLES / "h200" / "many-cases.jsonl.gz")
    token_ms = {
        one.scheme: one.token_ms
        for one in read_records(EXAMPLES / "h200" / "decode-llama.jsonl.gz")
        if (one.model, one.batch, one.new_tokens, one.kv_bits) == ("llama-13b", 1, 128, 16)
    }
    text = " ".join(README.read_text().split())

    few = [*speedups[1], *speedups[4], *speedups[8]]
    means = [f"{statistics.geometric_mean(speedups[tokens]):.2f}" for tokens in (16, 32, 64, 128)]
    assert len(few) == 60
    assert f"`flexq` is {min(few):.1f} to {max(few):.1f} times as fast" in text
    assert f"({statistics.geometric_mean(few):.2f} in the geometric mean)" in text
    assert f"{', '.join(means[:3])} and {means[3]} times at M = 16, 32, 64 and 128" in text
    ours, dense, int8 = (token_ms[name] for name in ("flexq-w6ax", "fp16", "smoothquant-w8a8"))
    said = f"{ours:.2f} ms a token with `flexq-w6ax`, {dense:.2f} in FP16 and {int8:.2f} in W8A8"
    assert said in text

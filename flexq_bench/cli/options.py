"""Options shared by several verbs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.errors import UsageError
from flexq_bench.sweeps.text import split_names

if TYPE_CHECKING:
    from flexq_bench.measure import Tuning  # imports torch, which would delay usage errors
    from flexq_bench.workloads.case import Regime

LARGEST_SEED = 2**63 - 1  # limit of the database
LARGEST_ID = 2**31 - 1  # of its rows
LARGEST_COUNT = 2**31 - 1  # of tokens, segments and the like
MOST_PROCESSES = 100  # per comparison; each starts Python and, on a GPU, creates a context


def finite(value: float | None) -> float | None:
    """Option callback that rejects NaN and infinity, which bounds don't always do."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to calculate with")
    return value


class BackendChoice(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


# Panels of --help, which group the options.
CASES = "Cases"
DEVICE = "Device and cluster"
MEASURING = "Measuring"
COMMITS = "Commits"
REPORTS = "Policy and reports"
OUTPUT = "Output"
DATABASE = "Database"

# Cases
KernelsOption = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="LABELS",
        help="Comma-separated labels or globs: flexq-w6a6,cublas*,abq-w{2..8}a8.",
        show_default=False,
        rich_help_panel=CASES,
    ),
]
KernelsFromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kernels-from",
        metavar="FILE.py|MODULE",
        help="Use external kernels of this file or module, named package.name; may be repeated.",
        show_default=False,
        rich_help_panel=CASES,
    ),
]
ProjectOption = Annotated[
    str | None,
    typer.Option(
        "--project",
        metavar="PATH",
        help="Use the commits and kernels of another repository with a flexq-bench.toml.",
        show_default=False,
        rich_help_panel=COMMITS,
    ),
]
ModelsOption = Annotated[
    str | None,
    typer.Option(
        "--models", metavar="NAMES", help="Only these models' layers.", rich_help_panel=CASES
    ),
]
SizesOption = Annotated[
    str | None,
    typer.Option(
        "--m", metavar="RANGES", help="Only these M: 1,4 or 1:8 or 4:64:x2.", rich_help_panel=CASES
    ),
]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", metavar="NAMES", help="Only these layers.", rich_help_panel=CASES),
]
StageOption = Annotated[
    str | None,
    typer.Option(
        "--stage", metavar="STAGES", help="Only gemm, or only linear.", rich_help_panel=CASES
    ),
]
CacheOption = Annotated[
    str | None,
    typer.Option("--cache", metavar="MODES", help="Only cold, or only hot.", rich_help_panel=CASES),
]

RegimeOption = Annotated[
    str | None,
    typer.Option(
        "--regime",
        metavar="REGIMES",
        help="boost: clocks without the power limit; sustained: under steady load, with watts "
        "and joules; or both: boost,sustained. Default: the suite's, else boost.",
        show_default=False,
        rich_help_panel=CASES,
    ),
]

# Device and cluster
BackendOption = Annotated[
    BackendChoice,
    typer.Option(
        "--backend", help="auto: GPUs if there are any, else the CPU.", rich_help_panel=DEVICE
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cpu, cuda or cuda:1. Default: the first of the backend.",
        show_default=False,
        rich_help_panel=DEVICE,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="WHERE",
        help="none: in this process; local: Ray on this machine; auto: this machine's Ray "
        "cluster; or an address: ray://HOST:10001.",
        rich_help_panel=DEVICE,
    ),
]
GpusOption = Annotated[
    str | None,
    typer.Option(
        "--gpus",
        metavar="SKUS",
        help="With --cluster: only these kinds, names or globs: 'NVIDIA H200,*A6000*'.",
        show_default=False,
        rich_help_panel=DEVICE,
    ),
]
RepeatOption = Annotated[
    int,
    typer.Option(
        "--repeat",
        min=1,
        max=100,
        help="With --cluster: number of measurements of each case, on different GPUs of its kind.",
        rich_help_panel=DEVICE,
    ),
]
TimesOption = Annotated[
    str | None,
    typer.Option(
        "--times",
        metavar="LIST",
        envvar="FLEXQ_BENCH_TIMES",
        help="With --cluster: timeouts in seconds, such as "
        "start=180,case=300,beat=10,lease=60,device=120.",
        show_default=False,
        rich_help_panel=DEVICE,
    ),
]

# Measuring
SeedOption = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=LARGEST_SEED,
        help="Seed of the random inputs.",
        rich_help_panel=MEASURING,
    ),
]
NoTuneOption = Annotated[
    bool,
    typer.Option(
        "--no-tune",
        help="Do not autotune: use the configuration that each kernel's heuristic chooses.",
        rich_help_panel=MEASURING,
    ),
]
RetuneOption = Annotated[
    bool,
    typer.Option(
        "--retune",
        help="Time configurations again even if a choice is stored.",
        rich_help_panel=MEASURING,
    ),
]

ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        min=1,
        max=MOST_PROCESSES,
        help="Number of pairs of processes. 1 is faster, but misses differences between processes.",
        rich_help_panel=MEASURING,
    ),
]

# Commits
RepositoryOption = Annotated[
    str,
    typer.Option(
        "--repository",
        metavar="FOLDER",
        help="Git checkout with the commits.",
        rich_help_panel=COMMITS,
    ),
]

# Policy and reports
PolicyOption = Annotated[
    str,
    typer.Option(
        "--policy",
        metavar="FILE",
        help="A .toml file, or the name of a built-in policy.",
        rich_help_panel=REPORTS,
    ),
]
MarkdownOption = Annotated[
    str | None,
    typer.Option(
        "--markdown",
        metavar="FILE",
        help="Write a Markdown comment for a pull request.",
        rich_help_panel=REPORTS,
    ),
]
JunitOption = Annotated[
    str | None,
    typer.Option("--junit", metavar="FILE", help="Write JUnit XML.", rich_help_panel=REPORTS),
]
JsonReportOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write JSON to a file; - for stdout.",
        rich_help_panel=REPORTS,
    ),
]

# Output
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]
JsonFileOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the records as JSON lines to a file; with - to stdout, and all other output "
        "to stderr.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]
OutOption = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the records to a .parquet or .jsonl file.",
        show_default=False,
        rich_help_panel=OUTPUT,
    ),
]

# Database
DbOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="SQLite file or postgresql:// URL. Default: $FLEXQ_BENCH_DB, else a file in your "
        "data folder.",
        show_default=False,
        rich_help_panel=DATABASE,
    ),
]


def given_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The options among a verb's parameters `names` that were given on the command line."""
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]


def tuning_of(*, no_tune: bool, retune: bool) -> Tuning:
    """The source of kernel configurations. Raises UsageError if both options are given."""
    from flexq_bench.measure import Tuning

    if no_tune and retune:
        raise UsageError("--no-tune times nothing and --retune everything: leave one of them out")
    return Tuning.NONE if no_tune else Tuning.FRESH if retune else Tuning.REMEMBERED


def regimes_of(regime: str | None) -> tuple[Regime, ...] | None:
    """The requested regimes; None: not given. Raises UsageError for an unknown one."""
    from flexq_bench.sweeps.sweep import REGIMES, select_words

    names = split_names(regime)
    return None if names is None else select_words("regime", names, REGIMES)


def restrictions_of(
    *,
    models: str | None,
    layers: str | None,
    kernels: str | None,
    stage: str | None,
    cache: str | None,
) -> dict[str, tuple[str, ...] | None]:
    """Build arguments of Suite.restrict, without M."""
    return {
        "models": split_names(models),
        "layers": split_names(layers),
        "kernels": split_names(kernels),
        "stages": split_names(stage),
        "caches": split_names(cache),
    }

"""Options shared by several commands: single ones (`DbOption`) and groups (`DeviceOptions`)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.errors import UsageError
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.workloads.case import Regime

if TYPE_CHECKING:
    # They import torch, which would delay usage errors.
    from flexq_bench.fleet import PoolOptions
    from flexq_bench.kernels.contract import Backend
    from flexq_bench.measure import Tuning
    from flexq_bench.measure.ab import InterleaveRules
    from flexq_bench.repository.project import Project, ProjectRevision

MAX_SEED = 2**63 - 1  # limit of the database
MAX_ID = 2**31 - 1  # of its rows
MAX_COUNT = 2**31 - 1  # of tokens, segments and the like
MAX_PROCESSES = 100  # per comparison; each starts Python and, on a GPU, creates a context


def finite(value: float | None) -> float | None:
    """Option callback that rejects NaN and infinity, which bounds don't always do."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to calculate with")
    return value


class BackendChoice(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


# A panel of --help per kind of option.
case_option = partial(typer.Option, rich_help_panel="Cases")
device_option = partial(typer.Option, rich_help_panel="Device and cluster")
measuring_option = partial(typer.Option, rich_help_panel="Measuring")
commits_option = partial(typer.Option, rich_help_panel="Commits")
output_option = partial(typer.Option, rich_help_panel="Output")
database_option = partial(typer.Option, rich_help_panel="Database")

# Cases
KernelsOption = Annotated[
    str | None,
    case_option(
        "--kernels",
        metavar="LABELS",
        help="Comma-separated labels or globs: flexq-w6a6,cublas*,abq-w{2..8}a8.",
    ),
]
RegimeOption = Annotated[
    str | None,
    case_option(
        "--regime",
        metavar="REGIMES",
        help="boost: clocks without the power limit; sustained: under steady load, with watts "
        "and joules; or both: boost,sustained. Default: the suite's, else boost.",
    ),
]


def regimes_of(regime: str | None) -> tuple[Regime, ...] | None:
    """The requested regimes; None: not given. Raises UsageError for an unknown one."""
    from flexq_bench.sweeps.sweep import REGIMES, select_words
    from flexq_bench.sweeps.text import split_names

    names = split_names(regime)
    return None if names is None else select_words("regime", names, REGIMES)


# Device and cluster
BackendOption = Annotated[
    BackendChoice, device_option("--backend", help="auto: GPUs if there are any, else the CPU.")
]
DeviceOption = Annotated[
    str | None,
    device_option(
        "--device",
        metavar="NAME",
        help="cpu, cuda or cuda:1. Default: the first of the backend.",
    ),
]
ClusterOption = Annotated[
    str,
    device_option(
        "--cluster",
        metavar="WHERE",
        help="none: in this process; local: Ray on this machine; auto: this machine's Ray "
        "cluster; or an address: ray://HOST:10001.",
    ),
]
TimesOption = Annotated[
    str | None,
    device_option(
        "--times",
        metavar="LIST",
        envvar="FLEXQ_BENCH_TIMES",
        help="With --cluster: timeouts in seconds, such as "
        "start=180,case=300,beat=10,lease=60,device=120.",
    ),
]


@dataclass(frozen=True)
class DeviceOptions:
    """A device of this process."""

    backend: BackendOption = BackendChoice.AUTO
    device: DeviceOption = None

    @property
    def requested_backend(self) -> Backend | None:
        """The requested backend; None: CUDA if there is a GPU, else CPU."""
        if self.backend is BackendChoice.AUTO:
            return None
        return "cuda" if self.backend is BackendChoice.CUDA else "cpu"

    def device_name(self) -> str:
        """Return the requested device, else the default one. Raises UsageError."""
        from flexq_bench.fleet import device_name
        from flexq_bench.measure.device import find_device

        name = device_name(self.requested_backend, self.device)
        find_device(name)
        return name


@dataclass(frozen=True)
class ClusterOptions(DeviceOptions):
    """Place of a measurement: a device of this process, or a cluster."""

    cluster: ClusterOption = "none"
    gpus: Annotated[
        str | None,
        device_option(
            metavar="SKUS",
            help="With --cluster: only these kinds, names or globs: 'NVIDIA H200,*A6000*'.",
        ),
    ] = None
    times: TimesOption = None

    @property
    def is_local(self) -> bool:
        """True if this process measures, not a cluster."""
        return self.cluster == "none"

    def device_name(self) -> str:
        """Return the device of this process, as in DeviceOptions."""
        if self.gpus:
            raise UsageError("--gpus is for a cluster: add --cluster local, or leave it out")
        return super().device_name()

    def pool(
        self,
        seed: int | None,
        tuning: TuningOptions | None = None,
        project: tuple[Project, ProjectRevision] | None = None,
        *,
        repeat: int = 1,
    ) -> PoolOptions:
        """Return the options of the pool that measures. project: None for this repository."""
        from flexq_bench.fleet import PoolOptions
        from flexq_bench.sweeps.text import split_names

        return PoolOptions(
            self.cluster,
            self.requested_backend,
            self.device,
            seed,
            (tuning or TuningOptions()).tuning,
            split_names(self.gpus) or (),
            repeat,
            self.times,
            *(project or ()),
        )


@dataclass(frozen=True)
class PlaceOptions(ClusterOptions):
    """Place of measurement of a suite, whose cases may be repeated on a cluster."""

    repeat: Annotated[
        int,
        device_option(
            min=1,
            max=100,
            help="With --cluster: number of measurements of each case, on different GPUs of its "
            "kind.",
        ),
    ] = 1


# Measuring
SeedOption = Annotated[
    int, measuring_option("--seed", min=0, max=MAX_SEED, help="Seed of the random inputs.")
]


@dataclass(frozen=True)
class TuningOptions:
    """The source of kernel configurations."""

    no_tune: Annotated[
        bool,
        measuring_option(
            "--no-tune",
            help="Do not autotune: use the configuration that each kernel's heuristic chooses.",
        ),
    ] = False
    retune: Annotated[
        bool,
        measuring_option("--retune", help="Time configurations again even if a choice is stored."),
    ] = False

    @property
    def tuning(self) -> Tuning:
        """The source of configurations. Raises UsageError if both options are given."""
        from flexq_bench.measure import Tuning

        if self.no_tune and self.retune:
            raise UsageError(
                "--no-tune times nothing and --retune everything: leave one of them out"
            )
        return Tuning.NONE if self.no_tune else Tuning.FRESH if self.retune else Tuning.REMEMBERED


BriefOption = Annotated[
    bool,
    measuring_option(
        "--brief",
        help="Times to a few percent, in about a fifth of the time: few samples, and "
        "configurations are timed coarsely. They compare with other brief times only.",
    ),
]


@dataclass(frozen=True)
class InterleavingOptions:
    """Parameters of an interleaved A/B measurement."""

    processes: Annotated[
        int,
        measuring_option(
            min=1,
            max=MAX_PROCESSES,
            help="Number of pairs of processes. 1 is faster, but misses differences between "
            "processes.",
        ),
    ] = 6
    seed: SeedOption = 0

    @property
    def rules(self) -> InterleaveRules:
        from flexq_bench.measure.ab import InterleaveRules

        return InterleaveRules.with_processes(self.processes)


_SECONDS_OF_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def duration_s(text: str | None) -> float | None:
    """Parse a time such as `90`, `90s`, `5m` or `1.5h`. Raises typer.BadParameter."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in _SECONDS_OF_UNIT or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is not a time: write 90s, 5m or 1h")
    return float(match[1]) * _SECONDS_OF_UNIT[match[2]]


@dataclass(frozen=True)
class SpendingOptions:
    """Limits of an interleaved A/B measurement."""

    budget: Annotated[
        str | None,
        measuring_option(
            metavar="TIME",
            help="Stop measuring after a time (90s, 5m, 1h); cases that are undecided by then are "
            "ambiguous. Default: no limit.",
        ),
    ] = None
    keep_going: Annotated[
        bool,
        measuring_option(help="Time all cases even if the result of one is wrong."),
    ] = False

    def applied_to(self, rules: InterleaveRules) -> InterleaveRules:
        """Add these limits to rules. Raises typer.BadParameter."""
        budget_s = duration_s(self.budget)
        return replace(rules, budget_s=budget_s, stops_at_wrong=not self.keep_going)


# Commits
RepositoryOption = Annotated[
    str,
    commits_option("--repository", metavar="FOLDER", help="Git checkout with the commits."),
]

# Output
JsonFlag = Annotated[bool, output_option("--json", help="Print JSON.")]
JsonFileOption = Annotated[
    str | None,
    output_option(
        "--json",
        metavar="FILE",
        help="Write the records as JSON lines to a file; with - to stdout, and all other output "
        "to stderr.",
    ),
]


@dataclass(frozen=True)
class RecordFileOptions:
    """Files to write the records of a run to."""

    as_json: JsonFileOption = None
    out: Annotated[
        str | None,
        output_option(metavar="FILE", help="Write the records to a .parquet or .jsonl file."),
    ] = None

    def files(self, plot: str | None = None) -> ResultFiles:
        """Return the files to write. Raises UsageError if one can't be written."""

        return ResultFiles(self.as_json, self.out, plot)


# Database
DbOption = Annotated[
    str | None,
    database_option(
        "--db",
        metavar="URL",
        help="SQLite file or postgresql:// URL. Default: $FLEXQ_BENCH_DB, else a file in your "
        "data folder.",
    ),
]


def given_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    """The options among a command's parameters `names` that were given on the command line."""
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    ]

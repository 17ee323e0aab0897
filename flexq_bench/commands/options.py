"""Options that several verbs share."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import typer

from workloads.ranges import parse_ranges


class BackendChoice(StrEnum):
    AUTO = "auto"
    CUDA = "cuda"
    CPU = "cpu"


DbOption = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="SQLite file or postgresql:// URL. Default: $FLEXQ_BENCH_DB, else a file in your "
        "data folder.",
        show_default=False,
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
JsonFileOption = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the records as JSON lines; - for stdout, all else then goes to stderr.",
        show_default=False,
    ),
]
OutOption = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="FILE",
        help="Write the records to a .parquet or .jsonl file.",
        show_default=False,
    ),
]
BackendOption = Annotated[
    BackendChoice, typer.Option("--backend", help="auto: GPUs if there are any, else the CPU.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="cpu, cuda or cuda:1. Default: the first of the backend.",
        show_default=False,
    ),
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="WHERE",
        help="none: in this process; local: Ray on this machine; or a Ray cluster's address.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the random inputs.")]
KernelsOption = Annotated[
    str | None,
    typer.Option(
        "--kernels",
        metavar="LABELS",
        help="Comma-separated labels or globs: flexq-w6a6,cublas*.",
        show_default=False,
    ),
]


def split_names(text: str | None) -> tuple[str, ...] | None:
    """A comma-separated list; a comma inside a variant's brackets separates nothing."""
    if text is None:
        return None
    parts = (part.strip() for part in re.split(r",(?![^\[\]]*\])", text))
    return tuple(part for part in parts if part)


def split_sizes(text: str | None) -> tuple[int, ...] | None:
    """Sizes as workloads.ranges reads them. Raises WorkloadError."""
    return None if text is None else parse_ranges(text)

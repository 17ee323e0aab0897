"""What quantization may cost: a versioned TOML file of limits for `gate accuracy`.

version = 1
schemes = ["flexq-w6ax"]         # what is judged, unless --scheme names others
base = "fp16"                    # optional: what it is compared with; fp16 is the model as it is
context = 2048                   # optional: tokens of a segment; else GPTQ's, or the model's own
max_tokens = 20470               # optional: predict at most so many of each text
limit = 200                      # optional: questions of each task

[[perplexity]]                   # none or more; each has one limit at least
text = "wikitext"                # its name: --data wikitext=FILE gives the file
increase = 0.5                   # optional: largest accepted increase of the perplexity
percent = 2.0                    # optional: the same relative to the base, in percent
upper_percent = 3.0              # optional: of the upper end of its 95 % interval

[[task]]                         # none or more
name = "piqa"                    # as lm-eval calls it, or a .yaml file beside the policy
metric = "acc"
margin_points = 2.0              # not inferior: the whole 95 % interval is above minus this

[parity]                         # optional: what kernels compute against what was evaluated
kernels = ["flexq-w6a6", "flexq-w6a8"]
tolerance = 0.001                # largest relative error
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path

from ci.policy import check_version, find_policy
from db.hashing import fingerprint
from flexq_bench.accuracy import FULL_PRECISION
from workloads.errors import WorkloadError
from workloads.tomlfile import Table, read_toml

_FOLDER = "policies/accuracy"
_TOP_KEYS = (
    *("version", "schemes", "base", "context", "max_tokens", "limit"),
    *("perplexity", "task", "parity"),
)
_PERPLEXITY_KEYS = ("text", "increase", "percent", "upper_percent")
_TASK_KEYS = ("name", "metric", "margin_points")
_PARITY_KEYS = ("kernels", "tolerance")


@dataclass(frozen=True, slots=True)
class PerplexityLimit:
    """How much a perplexity may grow on a text; None: this is not limited."""

    text: str
    increase: float | None
    percent: float | None
    upper_percent: float | None


@dataclass(frozen=True, slots=True)
class TaskLimit:
    """By how many points the metric of a task may be worse."""

    name: str
    metric: str
    margin_points: float


@dataclass(frozen=True, slots=True)
class ParityLimit:
    """How far kernels may be from what was evaluated: see flexq_bench.accuracy.parity."""

    kernels: tuple[str, ...]
    tolerance: float


@dataclass(frozen=True, slots=True)
class AccuracyPolicy:
    """A policy named after its file. None: as the module's head says."""

    name: str
    version: int  # of the form of its file
    fingerprint: str  # of what its file says: SHA-256 in hexadecimal digits
    schemes: tuple[str, ...]
    base: str
    context: int | None
    max_tokens: int | None
    limit: int | None
    perplexities: tuple[PerplexityLimit, ...]
    tasks: tuple[TaskLimit, ...]
    parity: ParityLimit | None


def load_accuracy_policy(name_or_path: str) -> AccuracyPolicy:
    """A policy of the package by name, or one of the user's own by the path of its `.toml`.

    Raises WorkloadError if there is none, or if the file has another form: the message names the
    file, the entry and the key.
    """
    return read_accuracy_policy(find_policy(name_or_path, _FOLDER))


def read_accuracy_policy(file: Traversable) -> AccuracyPolicy:
    """As load_accuracy_policy, of a file."""
    values = read_toml(file)
    check_version(file.name, values.get("version"))
    table = Table(values, file.name, _TOP_KEYS)
    perplexities = tuple(
        _perplexity(Table(entry, f"{file.name}, perplexity {position}", _PERPLEXITY_KEYS))
        for position, entry in enumerate(_entries(table, "perplexity"), start=1)
    )
    tasks = tuple(
        _task(Table(entry, f"{file.name}, task {position}", _TASK_KEYS), file)
        for position, entry in enumerate(_entries(table, "task"), start=1)
    )
    if not perplexities and not tasks:
        raise WorkloadError(f"{file.name}: limits nothing: add a [[perplexity]] or a [[task]]")
    return AccuracyPolicy(
        name=file.name.removesuffix(".toml"),
        version=table.integer("version"),
        fingerprint=fingerprint(values),
        schemes=table.texts("schemes"),
        base=table.text("base", default=FULL_PRECISION),
        context=_integer(table, "context"),
        max_tokens=_integer(table, "max_tokens"),
        limit=_integer(table, "limit"),
        perplexities=perplexities,
        tasks=tasks,
        parity=_parity(table, file.name),
    )


def _perplexity(table: Table) -> PerplexityLimit:
    found = PerplexityLimit(
        table.text("text"),
        _number(table, "increase"),
        _number(table, "percent"),
        _number(table, "upper_percent"),
    )
    if found.increase is None and found.percent is None and found.upper_percent is None:
        raise WorkloadError(
            f"{table.where}: limits nothing: add increase, percent or upper_percent"
        )
    return found


def _task(table: Table, file: Traversable) -> TaskLimit:
    name = table.text("name")
    if name.endswith((".yaml", ".yml")) and isinstance(file, Path):
        name = str(file.parent / name)
    return TaskLimit(name, table.text("metric"), table.number("margin_points"))


def _parity(table: Table, file: str) -> ParityLimit | None:
    if "parity" not in table:
        return None
    limits = Table(table.table("parity"), f"{file}, parity", _PARITY_KEYS)
    return ParityLimit(limits.texts("kernels"), limits.number("tolerance"))


def _entries(table: Table, key: str) -> tuple[dict[str, object], ...]:
    return table.tables(key) if key in table else ()


def _integer(table: Table, key: str) -> int | None:
    return table.integer(key) if key in table else None


def _number(table: Table, key: str) -> float | None:
    return table.number(key) if key in table else None

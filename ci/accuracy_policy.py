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
from typing import Self

from pydantic import model_validator

from ci.policy import check_version, find_policy
from db.hashing import fingerprint
from flexq_bench.accuracy import FULL_PRECISION
from workloads.data_files import (
    Amount,
    Count,
    DataTable,
    Entries,
    Text,
    Texts,
    read_toml,
    validated,
)
from workloads.errors import WorkloadError

_FOLDER = "policies/accuracy"


class PerplexityLimit(DataTable):
    """How much a perplexity may grow on a text; None: this is not limited."""

    text: Text
    increase: Amount | None = None
    percent: Amount | None = None
    upper_percent: Amount | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.increase is None and self.percent is None and self.upper_percent is None:
            raise WorkloadError("limits nothing: add increase, percent or upper_percent")
        return self


class TaskLimit(DataTable):
    """By how many points the metric of a task may be worse."""

    name: Text
    metric: Text
    margin_points: Amount


class ParityLimit(DataTable):
    """How far kernels may be from what was evaluated: see flexq_bench.accuracy.parity."""

    kernels: Texts
    tolerance: Amount


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


class _PolicyTable(DataTable):
    """A policy's file, as the module's head describes it."""

    version: Count
    schemes: Texts
    base: Text = FULL_PRECISION
    context: Count | None = None
    max_tokens: Count | None = None
    limit: Count | None = None
    perplexity: Entries[PerplexityLimit] = ()
    task: Entries[TaskLimit] = ()
    parity: ParityLimit | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if not self.perplexity and not self.task:
            raise WorkloadError("limits nothing: add a [[perplexity]] or a [[task]]")
        return self


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
    table = validated(_PolicyTable, values, file.name)
    return AccuracyPolicy(
        name=file.name.removesuffix(".toml"),
        version=table.version,
        fingerprint=fingerprint(values),
        schemes=table.schemes,
        base=table.base,
        context=table.context,
        max_tokens=table.max_tokens,
        limit=table.limit,
        perplexities=table.perplexity,
        tasks=tuple(_located(task, file) for task in table.task),
        parity=table.parity,
    )


def _located(task: TaskLimit, file: Traversable) -> TaskLimit:
    """The task; of one in a file beside the policy, with the path of that file as its name."""
    if task.name.endswith((".yaml", ".yml")) and isinstance(file, Path):
        return task.model_copy(update={"name": str(file.parent / task.name)})
    return task

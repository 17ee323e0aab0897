"""Accepted loss of quantization: a versioned TOML file of limits for `gate accuracy`.

version = 1
schemes = ["flexq-w6ax"]         # the schemes to judge, unless --scheme names others
base = "fp16"                    # optional: baseline scheme; fp16 is the unquantized model
context = 2048                   # optional: tokens of a segment; else GPTQ's, or the model's own
max_tokens = 20470               # optional: predict at most so many of each text
limit = 200                      # optional: questions of each task
chat_template = true             # optional: apply the tokenizer's chat template
few_shot = 5                     # optional: examples before each question; else the task's own
bos = "segment"                  # optional: segment, text or none; else the tokenizer's setting
detect = 1.0                     # optional: the least loss to detect, in percent of the perplexity;
                                 # the gate plans how many tokens that takes
power = 0.95                     # optional: probability of detecting it
alpha = 0.01                     # optional: probability that a model without a loss fails

[[perplexity]]                   # none or more; each has one limit at least
text = "wikitext"                # its name: --data wikitext=FILE gives the file
at_most = 15.0                   # optional: largest accepted perplexity, for any base
increase = 0.5                   # optional: largest accepted increase of the perplexity
percent = 2.0                    # optional: the same relative to the base, in percent
upper_percent = 3.0              # optional: of the upper end of its 95 % interval

[[task]]                         # none or more
name = "piqa"                    # as lm-eval calls it, or a .yaml file beside the policy
metric = "acc"
margin_points = 2.0              # not inferior: the whole 95 % interval is above minus this
at_least = 0.6                   # optional: least accepted value, for any base

[kl]                             # optional: KL divergence from the original's predictions, in nats
text = "wikitext"
mean = 0.02                      # optional, each: over the predicted tokens
median = 0.01
p95 = 0.06
p99 = 0.15
p999 = 0.4
max = 3.0

[agreement]                      # optional: with the original's predictions, shares of 1
text = "wikitext"
top1 = 0.9                       # optional: tokens for which both have the same top-1 token
top5 = 0.9                       # optional: share of the original's top 5 that both have

[fidelity]                       # optional: against the original quantized here by the scheme
text = "wikitext"
percent = 0.4                    # largest difference of the perplexity, either way
kl_percent = 8.0                 # of the mean KL divergence, in percent of the scheme's own
kl = 0.0002                      # optional: differences of the mean KL below this, in nats, pass

[parity]                         # optional: kernel outputs against the evaluated model
kernels = ["flexq-w6a6", "flexq-w6a8"]
tolerance = 0.001                # largest relative error
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Self, get_args

from pydantic import model_validator

from flexq_bench.accuracy.results import FULL_PRECISION, Bos
from flexq_bench.ci.policy import check_version, find_policy
from flexq_bench.db.identity import fingerprint
from flexq_bench.workloads.data_files import (
    Amount,
    Count,
    DataTable,
    Entries,
    Flag,
    Natural,
    Share,
    Text,
    Texts,
    error_prefix,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError

_FOLDER = "policies/accuracy"
# Below, the planned numbers of tokens are beyond floats.
_LEAST_DETECT, _LEAST_ALPHA = 1e-3, 1e-9


class PerplexityLimit(DataTable):
    """Limits of a perplexity on a text, and of its increase; None: not limited."""

    text: Text
    at_most: Amount | None = None
    increase: Amount | None = None
    percent: Amount | None = None
    upper_percent: Amount | None = None


class TaskLimit(DataTable):
    """Points by which the metric of a task may be worse."""

    name: Text
    metric: Text
    margin_points: Amount
    at_least: Share | None = None


class KlLimit(DataTable):
    """The largest KL divergences from the original's predictions, in nats; None: not limited."""

    text: Text
    mean: Amount | None = None
    median: Amount | None = None
    p95: Amount | None = None
    p99: Amount | None = None
    p999: Amount | None = None
    max: Amount | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        _check_any(self)
        return self


class AgreementLimit(DataTable):
    """The least shares of agreement with the original's predictions; None: not limited."""

    text: Text
    top1: Share | None = None
    top5: Share | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        _check_any(self)
        return self


class FidelityLimit(DataTable):
    """Largest accepted difference from the original quantized here by the same scheme.

    percent: of the perplexity. kl_percent: of the mean KL divergence. kl: nats; a smaller
    difference of the mean KL divergence passes at any percentage.
    """

    text: Text
    percent: Amount
    kl_percent: Amount
    kl: Amount = 0.0


class ParityLimit(DataTable):
    """Largest accepted error of kernels: see flexq_bench.accuracy.parity."""

    kernels: Texts
    tolerance: Amount


@dataclass(frozen=True, slots=True)
class PlannedPower:
    """Error rates of a policy. detect: percent of perplexity; None: nothing is planned.

    power: probability to detect that loss; alpha: to fail a model without one.
    """

    detect: float | None = None
    power: float = 0.95
    alpha: float = 0.01


@dataclass(frozen=True, slots=True)
class AccuracyPolicy:
    """A policy named after its file. None: as described in the module's docstring."""

    name: str
    version: int  # of the file format
    fingerprint: str  # SHA-256 of the file's content, in hexadecimal digits
    schemes: tuple[str, ...]
    base: str
    context: int | None
    max_tokens: int | None
    limit: int | None
    perplexities: tuple[PerplexityLimit, ...]
    tasks: tuple[TaskLimit, ...]
    parity: ParityLimit | None
    kl: KlLimit | None = None
    agreement: AgreementLimit | None = None
    fidelity: FidelityLimit | None = None
    planned: PlannedPower = PlannedPower()
    bos: Bos | None = None
    chat_template: bool = False
    few_shot: int | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """Names of the texts that have a limit, each once."""
        optional_limits = (self.kl, self.agreement, self.fidelity)
        limits = (*self.perplexities, *(limit for limit in optional_limits if limit is not None))
        return tuple(dict.fromkeys(limit.text for limit in limits))


class _PolicyTable(DataTable):
    """A policy file, as described in the module's docstring."""

    version: Count
    schemes: Texts
    base: Text = FULL_PRECISION
    context: Count | None = None
    max_tokens: Count | None = None
    limit: Count | None = None
    chat_template: Flag = False
    few_shot: Natural | None = None
    perplexity: Entries[PerplexityLimit] = ()
    task: Entries[TaskLimit] = ()
    kl: KlLimit | None = None
    agreement: AgreementLimit | None = None
    fidelity: FidelityLimit | None = None
    parity: ParityLimit | None = None
    bos: Text | None = None
    detect: Amount | None = None
    power: Share | None = None
    alpha: Share | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        optional_limits = (self.kl, self.agreement, self.fidelity)
        if not self.perplexity and not self.task and not any(optional_limits):
            alone = "" if self.parity is None else ", [parity] is of kernels alone"
            raise WorkloadError(
                f"limits nothing{alone}: add a [[perplexity]], a [[task]], [kl] or [agreement]"
            )
        for number, limit in enumerate(self.perplexity, start=1):
            if self.detect is None:  # each of them is a limit itself
                with error_prefix(f"perplexity {number}"):
                    _check_any(limit)
        if self.bos is not None and self.bos not in get_args(Bos):
            raise WorkloadError(f"bos is {self.bos!r}: give {', '.join(get_args(Bos))}")
        if self.detect is None and not (self.power is None and self.alpha is None):
            raise WorkloadError("power and alpha are of a loss to detect: add detect, in percent")
        if self.detect is not None and self.detect < _LEAST_DETECT:
            raise WorkloadError(
                f"detect is {self.detect}: give the least loss that must be caught, in percent, "
                f"from {_LEAST_DETECT} on"
            )
        if self.power is not None and not 0.5 < self.power < 1:
            raise WorkloadError(f"power is {self.power}: give a number between 0.5 and 1")
        if self.alpha is not None and not _LEAST_ALPHA <= self.alpha < 0.5:
            raise WorkloadError(f"alpha is {self.alpha}: give a number from {_LEAST_ALPHA} to 0.5")
        return self


def load_accuracy_policy(name_or_path: str) -> AccuracyPolicy:
    """Load a bundled policy by name, or any policy by the path of its `.toml`.

    Raises WorkloadError if there is none, or if the file is malformed: the message names the file,
    the entry and the key.
    """
    return read_accuracy_policy(find_policy(name_or_path, _FOLDER))


def read_accuracy_policy(file: Traversable) -> AccuracyPolicy:
    """Return the accuracy policy of a file; errors as load_accuracy_policy."""
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
        kl=table.kl,
        agreement=table.agreement,
        fidelity=table.fidelity,
        planned=_planned(table),
        chat_template=table.chat_template,
        few_shot=table.few_shot,
        bos=table.bos,  # type: ignore[arg-type]  # _check_limits
    )


def _planned(table: _PolicyTable) -> PlannedPower:
    plan = {"detect": table.detect, "power": table.power, "alpha": table.alpha}
    return PlannedPower(**{name: value for name, value in plan.items() if value is not None})


def _check_any(limit: DataTable) -> None:
    """Raise WorkloadError if a table has a subject, but no limit."""
    optional = [name for name, field in type(limit).model_fields.items() if not field.is_required()]
    if all(getattr(limit, name) is None for name in optional):
        raise WorkloadError(f"limits nothing: add {', '.join(optional[:-1])} or {optional[-1]}")


def _located(task: TaskLimit, file: Traversable) -> TaskLimit:
    """The task; for one in a file beside the policy, with the path of that file as its name."""
    if task.name.endswith((".yaml", ".yml")) and isinstance(file, Path):
        return task.model_copy(update={"name": str(file.parent / task.name)})
    return task

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
allow_not_judged = ["fidelity*"] # optional: patterns of checks that need not be judged

[[perplexity]]                   # none or more; each has one limit at least
text = "wikitext"                # its name: --data wikitext=FILE gives the file
at_most = 15.0                   # optional: largest accepted perplexity, of all tokens
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

[artefacts]                      # optional: the folder, other than weights, as the original's
allow = ["chat_template"]        # optional: patterns of differences that are accepted

[weights]                        # optional: each row, in quantization steps of its format
allow = ["weights.lm_head"]      # optional: patterns of layers and tensors that may differ

[parity]                         # optional: every launch of a kernel against the reference
tolerance = 0.001                # largest relative error
kernels = ["flexq-w6a6"]         # optional: taken for their formats in place of those that decode
largest_batch = 32               # optional: of decode steps

[serving_path]                   # optional: decode's engine against transformers; all optional:
batches = [1, 3, 8, 32]          # sequences at a time
tokens = 512                     # of a sequence, at most
steps = 12                       # after each prompt
mean = 3.0                       # divergence of a phase, in multiples of what rounding makes
worst = 5.0                      # of a token, in multiples of the worst by rounding
prompts = 16                     # texts that it continues by the likeliest tokens
new = 48                         # tokens of each, at most
agreement = 0.1                  # least share of the original's tokens before the first other one
looping = 0.25                   # largest increase of the share of texts that end in a loop
ended = 0.25                     # largest difference of the share that ends with an end token
length = 0.5                     # largest relative difference of the mean length
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self, cast, get_args

from pydantic import create_model, model_validator

from flexq_bench.accuracy.results import FULL_PRECISION, Bos
from flexq_bench.ci.accuracy_gate.checks import CHECKS
from flexq_bench.ci.accuracy_gate.contract import (
    AccuracyPolicy,
    Check,
    CheckLimit,
    PlannedPower,
    Stage,
)
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


class _Settings(DataTable):
    """The keys of a policy file besides the tables of checks; see the module's docstring."""

    version: Count
    schemes: Texts
    base: Text = FULL_PRECISION
    context: Count | None = None
    max_tokens: Count | None = None
    limit: Count | None = None
    chat_template: Flag = False
    few_shot: Natural | None = None
    bos: Text | None = None
    detect: Amount | None = None
    power: Share | None = None
    alpha: Share | None = None
    allow_not_judged: Texts = ()

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        limits = _limits(self)
        if all(limit.check.stage is not Stage.RESULTS for limit in limits):
            alone = "".join(f", [{limit.check.key}] is of no text or task" for limit in limits)
            raise WorkloadError(
                f"limits nothing{alone}: add a [[perplexity]], a [[task]], [kl] or [agreement]"
            )
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
        numbers: dict[str, int] = {}
        for limit in limits:
            key = limit.check.key
            numbers[key] = numbers.get(key, 0) + 1
            with error_prefix(f"{key} {numbers[key]}" if limit.check.repeated else key):
                limit.check.check_table(limit.table, self.planned)
        return self

    @property
    def planned(self) -> PlannedPower:
        """The error rates, with the defaults of what is omitted."""
        plan = {"detect": self.detect, "power": self.power, "alpha": self.alpha}
        return PlannedPower(**{name: value for name, value in plan.items() if value is not None})


def _by_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a policy's values with a table for each text of a table of several texts."""
    return {
        key: [entry for table in value for entry in _per_text(table)]
        if key in _OF_TEXTS and isinstance(value, list)
        else _per_text(value)
        if key in _OF_TEXTS
        else value
        for key, value in values.items()
    }


def _per_text(table: Any) -> list[Any]:
    if isinstance(table, dict) and isinstance(table.get("text"), list) and table["text"]:
        return [{**table, "text": text} for text in table["text"]]
    return [table]


def _field(check: Check[Any]) -> tuple[Any, Any]:
    if check.repeated or "text" in check.table.model_fields:
        return Entries[check.table], ()  # type: ignore[name-defined]
    return check.table | None, None


_OF_TEXTS = {check.key for check in CHECKS if "text" in check.table.model_fields}


def policy_table(checks: Sequence[Check[Any]]) -> type[_Settings]:
    """Return the type of a policy file with the tables of these checks."""
    tables: dict[str, Any] = {check.key: _field(check) for check in checks}
    return create_model("_PolicyTable", __base__=_Settings, **tables)


_PolicyTable = policy_table(CHECKS)


def _limits(settings: _Settings) -> tuple[CheckLimit, ...]:
    """Return the tables of all checks, in the registry's order."""
    limits = []
    for check in CHECKS:
        value = getattr(settings, check.key)
        tables = value if isinstance(value, tuple) else () if value is None else (value,)
        limits += [CheckLimit(check, table) for table in tables]
    return tuple(limits)


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
    settings = validated(_PolicyTable, _by_text(values), file.name)
    folder = file.parent if isinstance(file, Path) else None
    return AccuracyPolicy(
        name=file.name.removesuffix(".toml"),
        version=settings.version,
        fingerprint=fingerprint(values),
        schemes=settings.schemes,
        base=settings.base,
        limits=tuple(
            CheckLimit(limit.check, limit.check.located(limit.table, folder))
            for limit in _limits(settings)
        ),
        context=settings.context,
        max_tokens=settings.max_tokens,
        limit=settings.limit,
        planned=settings.planned,
        chat_template=settings.chat_template,
        few_shot=settings.few_shot,
        bos=cast(Bos | None, settings.bos),  # _check_settings
        allow_not_judged=settings.allow_not_judged,
    )

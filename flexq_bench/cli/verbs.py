"""All verbs of the command line; a verb's module is imported when the verb is used."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from flexq_bench.packages import without_collection


class Verb(NamedTuple):
    """A function of a module of this package, or its typer.Typer.

    summary: the first paragraph of its help.
    """

    module: str
    name: str
    summary: str


VERBS = {
    "run": Verb(
        "run",
        "run",
        "Measure a suite, store each result as soon as it is there, print a table.",
    ),
    "sweep": Verb(
        "sweep",
        "sweep",
        "Measure kernels on M, N and K, a model's layers, a run's cases, or a trace.",
    ),
    "status": Verb(
        "status",
        "status",
        "Show unfinished runs, nightly runs, workers and requests of the database.",
    ),
    "worker": Verb(
        "worker",
        "worker",
        "Measure the requests in the database one after the other, until it is stopped.",
    ),
    "accuracy": Verb(
        "accuracy",
        "accuracy",
        "Evaluate a model as it is and under schemes, or a checkpoint; store results, print "
        "tables.",
    ),
    "quantize": Verb(
        "quantize",
        "quantize",
        "Quantize a model and write it as a checkpoint, which other verbs evaluate and time.",
    ),
    "sensitivity": Verb(
        "sensitivity",
        "sensitivity",
        "Quantize one kind of layer at a time and show the perplexity increase.",
    ),
    "decode": Verb(
        "decode",
        "decode",
        "Decode a model end to end under each scheme; store and compare times, memory and energy.",
    ),
    "serve-model": Verb(
        "serve_model",
        "serve_model",
        "Serve a model by the interface of OpenAI's API until Ctrl-C: completions and chat.",
    ),
    "reproduce": Verb(
        "reproduce",
        "reproduce",
        "Measure what published tables need; print their numbers beside ours, with a verdict.",
    ),
    "compare": Verb("compare", "compare", "Show which cases are slower in HEAD than in BASE."),
    "detect": Verb(
        "detect",
        "detect",
        "Show where the level of a series changed, and its other components.",
    ),
    "nightly": Verb(
        "nightly",
        "nightly",
        "Measure this commit on every kind of GPU, compare outliers with earlier commits, report.",
    ),
    "notify": Verb(
        "notify",
        "notify",
        "Send due notifications once each: alerts, improvements, gates, nightly runs and digests.",
    ),
    "bisect": Verb(
        "bisect",
        "bisect",
        "Find the commit that made a series slower or faster, by interleaved comparisons with "
        "GOOD.",
    ),
    "gate": Verb("gates", "app", "Decide by rules whether a change may be merged."),
    "alerts": Verb("alerts", "app", "List alerts of regressions, and set their states."),
    "fleet": Verb("fleet", "app", "Take nodes and GPUs out of the fleet, and put them back."),
    "init": Verb(
        "init",
        "init",
        "Write flexq-bench.toml, a suite, and workflows that gate pull requests and run nights.",
    ),
    "explain": Verb(
        "explain",
        "explain",
        "Show every verdict of an alert as it was decided, its evidence, and what today's rules "
        "say.",
    ),
    "static": Verb(
        "static",
        "static",
        "Store registers, spills, shared memory, occupancy and instruction counts of the kernels.",
    ),
    "list": Verb(
        "listing",
        "list_",
        "List kernels, operations, schemes, suites, models, devices, runs, series, noise, alarms.",
    ),
    "db": Verb("database", "app", "Upgrade, fill, empty and inspect the database."),
    "tour": Verb(
        "tour", "tour", "Gate a kernel that a commit makes slower, in minutes, in a new repository."
    ),
    "doctor": Verb(
        "doctor",
        "doctor",
        "Check Python, torch, the GPU stack, Ray, the database and the git tree.",
    ),
    "demo": Verb(
        "demo",
        "demo",
        "Show the dashboard on stored nights, alerts, gates and checkpoints, until Ctrl-C.",
    ),
    "dashboard": Verb(
        "dashboard",
        "dashboard",
        "Show stored results in the browser until Ctrl-C.",
    ),
    "serve-api": Verb(
        "serve_api",
        "serve_api",
        "Serve stored results as JSON until Ctrl-C. /openapi.json describes it.",
    ),
}


class _Commands(MutableMapping[str, Any]):
    """Commands by verb; each is made of its module when it is read."""

    def __init__(self, verbs: dict[str, Verb]) -> None:
        self._verbs, self._made = verbs, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command_of(name, self._verbs[name])
        return self._made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._verbs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._verbs)

    def __len__(self) -> int:
        return len(self._verbs)


def verb_group(verbs: dict[str, Verb]) -> type[TyperGroup]:
    """Return the class of a command group of these verbs, whose help imports none of them."""

    class VerbGroup(TyperGroup):
        """A group of verbs."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.commands = _Commands(dict(verbs))
            self._lists = False

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self._lists = True
            try:
                super().format_help(ctx, formatter)
            finally:
                self._lists = False

        def list_commands(self, ctx: Any) -> list[str]:
            return list(self.commands)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if self._lists:
                return TyperCommand(name=cmd_name, help=verbs[cmd_name].summary)
            return super().get_command(ctx, cmd_name)

    return VerbGroup


def _command_of(name: str, verb: Verb) -> Any:
    with without_collection():
        module = import_module(f"flexq_bench.cli.{verb.module}")
    member = getattr(module, verb.name)
    if isinstance(member, typer.Typer):
        command = typer.main.get_group(member)
        command.name = name
        return command
    alone = typer.Typer(add_completion=False)
    alone.command(name)(member)
    return typer.main.get_command(alone)

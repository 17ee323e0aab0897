"""Command lines with at least one word that can't be, for every verb, made by a seed.

An input is a verb with some of its options, most of them as they should be, and one or two that
are not: of another type, beyond every bound, a name of nothing, a file that can't be, or options
that exclude each other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer.main

from flexq_bench.cli.app import app

HUGE = "9" * 30
NOT_NUMBERS = ("", " ", "abc", "1e999", "nan", "inf", "0x10", "--", HUGE, f"-{HUGE}", "½")
NO_RANGES = ("0", "-1", "5:1", "1:9:0", "1:9:x1", ",", "1:", ":", "4.5", "1:16777217", HUGE, "1 2",
             "@", "@/dev/zero", "@/nonexistent", "1:16777216", "nan", "x2")  # fmt: skip
NO_NAMES = ("", " ", ",", ",,", "no-such-thing", "☃", "\udcff", "\x1b[31mred", "a" * 5000, "../..",
            "'; DROP TABLE run; --", "%s%n", "{0}", "no[such", "-")  # fmt: skip
NO_FILES = ("", "/", "/proc/none/there", "a" * 5000, "\udcff/x", "/dev/null/x", ".")
NO_TARGETS = ("", "/", "/nonexistent/r.jsonl", "a" * 5000 + ".jsonl", "/proc/none/r.json", ".")
# By the metavar of a text, or else by the option's or argument's name.
TEXTS: dict[str, tuple[str, ...]] = {
    "RANGES": NO_RANGES,
    "LIST": ("foo=3", "w0a0", "nan", "=", "start=-1", "start=nan", "=,=", "☃"),
    "FILE": NO_TARGETS,
    "PATH": NO_FILES,
    "FOLDER": ("/proc/none/there", "a" * 5000, "\udcff/x", "/dev/null/x"),
    "[KIND:]PATH": NO_FILES,
    "[NAME=][KIND:]PATH": NO_FILES,
    "DIR": NO_FILES[1:-1],
    "URL": ("junk://x", "postgresql://nobody@127.0.0.1:1/x", "/", "", "sqlite://", "\udcff"),
    "WHERE": ("", "junk", "ray://", "ray://x", "ray://127.0.0.1:1", "127.0.0.1:1"),
    "--lengths": NO_FILES,
    "--report": ("/nonexistent", "/dev/null", "a" * 5000),
    "--csv": NO_FILES,
    "--kernels-from": (*NO_NAMES, *NO_FILES, "/nonexistent.py"),
    "--policy": ("", "/", "no-such", "/nonexistent.toml", "\udcff", "/dev/null", "."),
    "--commit-url": ("javascript:alert(1)", "no url", "https://"),
    "--base-path": ("a b", "\udcff", "../.."),
    "file": ("/", "/nonexistent/r.jsonl", "results.xyz", "", "a" * 5000 + ".jsonl"),
    "files": ("/", "/nonexistent/r.jsonl", "results.xyz", "", "/dev/null"),
    "suite": (*NO_NAMES, "/nonexistent.toml", "/", "/dev/zero.toml"),
}
# What is a word for people, or goes with anything: no value of these is wrong.
FREE = {"--note", "--by", "--night", "--address", "--column"}
VALID: dict[str, tuple[str, ...]] = {
    "suite": ("smoke",),
    "what": ("kernels", "schemes", "suites", "models", "devices", "runs", "series", "noise"),
    "base": ("HEAD", "cublas-fp16"),
    "head": ("HEAD", "cublaslt-w8a8"),
    "model": ("TINY",),
    "series": ("1",),
    "alert": ("1",),
    "file": ("out.jsonl",),
    "files": ("results.jsonl",),
    "--m": ("1", "1:4"),
    "--n": ("8",),
    "--k": ("8",),
    "--kernels": ("cublas-fp16", "flexq*"),
    "--base": ("HEAD",),
    "--head": ("HEAD",),
    "--good": ("HEAD",),
    "--bad": ("HEAD",),
    "--model": ("TINY",),
    "--data": ("TINY/heldout.txt",),
    "--scheme": ("flexq-w6ax",),
    "--schemes": ("flexq-w6ax",),
    "--out": ("out.jsonl",),
    "--device": ("cpu",),
    "--db": ("DB",),
    "--policy": ("TINY/policy.toml",),
    "--seed": ("0", "7"),
    "--limit": ("1",),
    "--processes": ("1",),
    "--poll": ("1",),
    "--stage": ("gemm",),
    "--cache": ("cold",),
}
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("run", "smoke", "--no-tune", "--retune"),
    ("run", "smoke", "--cluster", "local", "--device", "cpu"),
    ("run", "smoke", "--repeat", "2"),
    ("run", "smoke", "--gpus", "*"),
    ("run", "smoke", "--resume", "1234", "--m", "4"),
    ("run", "smoke", "--backend", "cuda", "--device", "cpu"),
    ("sweep", "--model", "llama-7b", "--n", "8"),
    ("sweep", "--model", "llama-7b", "--config", "TINY"),
    ("sweep", "--n", "8"),
    ("sweep", "--like", "1234", "--n", "8"),
    ("status", "--prometheus", "--json"),
    ("detect", "1", "--csv", "series.csv"),
    ("detect", "--column", "x"),
    ("detect",),
    ("db", "prune"),
    ("decode", "TINY", "--serve", "--batch", "2"),
    ("decode", "TINY", "--lengths", "x"),
    ("decode", "TINY", "--scheme", "fp16,fp16"),
    ("list", "suites", "--limit", "3"),
    ("list", "kernels", "--model", "llama-7b"),
    ("list", "models", "--all"),
    ("gate", "perf", "--base", "HEAD", "--json", "x", "--junit", "x"),
    ("compare", "HEAD", "cublas-fp16"),
    ("bisect", "empty gemm cold m1n1k1", "--good", "HEAD", "--bad", "HEAD"),
    ("accuracy", "--model", "TINY"),
)


@dataclass(frozen=True, slots=True)
class Verb:
    words: tuple[str, ...]
    parameters: tuple[Any, ...]


def verbs(command: Any = None, words: tuple[str, ...] = ()) -> Iterator[Verb]:
    command = command or typer.main.get_command(app)
    if not hasattr(command, "commands"):
        yield Verb(words, tuple(command.params))
        return
    for name, inner in command.commands.items():
        yield from verbs(inner, (*words, name))


def inputs(count: int, seed: int, places: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """places: what TINY and DB stand for. Every verb comes equally often."""
    chance = random.Random(seed)
    every = [verb for verb in verbs() if verb.words not in (("tour",), ("demo",))]
    for number in range(count):
        if number % 12 == 0:
            made = chance.choice(EXCLUSIVE)
        else:
            made = _input(every[number % len(every)], chance)
        yield tuple(_placed(word, places) for word in made)


def _placed(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word


def _input(verb: Verb, chance: random.Random) -> tuple[str, ...]:
    breakable = [p for p in verb.parameters if _key(p) not in FREE and not is_flag(p)]
    broken = chance.sample(breakable, min(len(breakable), chance.choice((1, 1, 2))))
    words: list[str] = []
    for parameter in verb.parameters:
        key = _key(parameter)
        if parameter in broken:
            value: str | None = _wrong(parameter, chance)
        elif parameter.required or (key in VALID and chance.random() < 0.2):
            value = chance.choice(VALID.get(key, ("1",)))
        elif is_flag(parameter) and chance.random() < 0.1:
            words.append(key)
            continue
        else:
            continue
        words += [key, value] if key.startswith("--") else [value]
    if not broken:
        words.append(chance.choice(("--no-such-option", "--db", "surplus\udcff")))
    return (*verb.words, *words)


def _wrong(parameter: Any, chance: random.Random) -> str:
    low, high = parameter.min, parameter.max
    if low is not None or high is not None:
        beyond = [*NOT_NUMBERS]
        beyond += [str(low - 1), str(low - 10**9)] if low is not None else []
        beyond += [str(high + 1), str(high * 10**9)] if high is not None else []
        # A series may be a case by its key, an alert none.
        return chance.choice(beyond)
    by_name = TEXTS.get(_key(parameter)) or TEXTS.get(str(parameter.metavar))
    return chance.choice(by_name or NO_NAMES)


def _key(parameter: Any) -> str:
    return str(parameter.opts[0])


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))

"""What a change may cost: a versioned TOML file of limits, owners and waivers.

version = 1
suite = "nightly"                    # a suite's name, or a .toml beside the policy
slower_percent = 2.0                 # largest accepted slow-down; 0: none
owner = "kernels"                    # optional: who is asked about a kernel without an own owner

[[limit]]                            # none or more; the first that fits a kernel counts
kernels = ["flexq-*", "flexq-*[*]"]  # labels or globs
slower_percent = 1.0
owner = "flexq"                      # optional

[[waiver]]                           # none or more: what is known, and accepted for a while
kernels = ["abq-w2a8"]
shapes = ["4096x4096"]               # optional: N x K
m = "1,8"                            # optional: see workloads.ranges
reason = "slower until the new packing lands"
owner = "abq"
expires = 2026-01-31                 # the last day on which it counts
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from flexq_bench.probes import is_probe
from workloads.case import Case
from workloads.errors import WorkloadError
from workloads.names import unknown
from workloads.patterns import check_pattern, is_glob, matches
from workloads.ranges import parse_ranges
from workloads.suite import Suite
from workloads.suites import load_suite
from workloads.tomlfile import Table, read_toml

VERSION = 1
_TOP_KEYS = ("version", "suite", "slower_percent", "owner", "limit", "waiver")
_LIMIT_KEYS = ("kernels", "slower_percent", "owner")
_WAIVER_KEYS = ("kernels", "shapes", "m", "reason", "owner", "expires")
_SHAPE = re.compile(r"(?P<n>[0-9]{1,18})x(?P<k>[0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest accepted slow-down of these kernels, in percent, and who answers for them."""

    kernels: tuple[str, ...]
    slower_percent: float
    owner: str = ""

    def fits(self, case: Case) -> bool:
        return _fits(self.kernels, case)


@dataclass(frozen=True, slots=True)
class Waiver:
    """Cases whose slow-down is known and accepted until the end of `expires`.

    shapes: (N, K); m: tokens; empty: all.
    """

    kernels: tuple[str, ...]
    reason: str
    owner: str
    expires: date
    shapes: tuple[tuple[int, int], ...] = ()
    m: tuple[int, ...] = ()

    def fits(self, case: Case) -> bool:
        return (
            _fits(self.kernels, case)
            and (not self.shapes or (case.gemm.n, case.gemm.k) in self.shapes)
            and (not self.m or case.gemm.m in self.m)
        )

    def has_expired(self, today: date) -> bool:
        return today > self.expires

    @property
    def name(self) -> str:
        """`abq-w2a8 4096x4096 m=1,8`."""
        shapes = [f"{n}x{k}" for n, k in self.shapes]
        sizes = [f"m={','.join(map(str, self.m))}"] if self.m else []
        return " ".join((",".join(self.kernels), *shapes, *sizes))


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy named after its file."""

    name: str
    suite: Suite
    default: Limit
    limits: tuple[Limit, ...] = ()
    waivers: tuple[Waiver, ...] = ()

    def limit_of(self, case: Case) -> Limit:
        """The first limit that fits the case; one without an owner has that of the policy."""
        return next((limit for limit in self.limits if limit.fits(case)), self.default)

    def owner_of(self, case: Case) -> str:
        return self.limit_of(case).owner or self.default.owner

    def waiver_of(self, case: Case, today: date) -> Waiver | None:
        """The first waiver that fits the case and counts today."""
        fitting = (w for w in self.waivers if w.fits(case) and not w.has_expired(today))
        return next(fitting, None)


def load_policy(name_or_path: str) -> Policy:
    """A policy of the package by name, or one of the user's own by the path of its `.toml`.

    Raises WorkloadError if there is none, or if the file has another form: the message names the
    file, the entry and the key.
    """
    return read_policy(find_policy(name_or_path))


def is_path(name_or_path: str) -> bool:
    """Whether a policy or a suite is named by its file."""
    return name_or_path.endswith(".toml") or os.sep in name_or_path


def find_policy(name_or_path: str, folder: str = "policies") -> Traversable:
    """The file of a policy; folder: where the package has those of this kind.

    Raises WorkloadError if none of them has the name.
    """
    if is_path(name_or_path):
        return Path(name_or_path)
    files = (resources.files("ci") / folder).iterdir()
    bundled = {f.name.removesuffix(".toml"): f for f in files if f.name.endswith("toml")}
    if name_or_path not in bundled:
        there_are = unknown("policy", name_or_path, sorted(bundled))
        raise WorkloadError(f"{there_are}; or give a .toml file")
    return bundled[name_or_path]


def _as_named(path: Path) -> Path:
    return path


def read_policy(
    file: Traversable,
    *,
    locate: Callable[[Path], Path] = _as_named,
    suites: Traversable | None = None,
) -> Policy:
    """As load_policy, of a file.

    locate: where to read a suite that is named by its file. suites: the folder of those that have
    names; None: the package's.
    """
    values = read_toml(file)
    check_version(file.name, values.get("version"))
    table = Table(values, file.name, _TOP_KEYS)
    suite = _suite(table, file, locate, suites)
    default = Limit(("*",), table.number("slower_percent"), table.text("owner", default=""))
    limits = tuple(
        _limit(Table(entry, f"{file.name}, limit {position}", _LIMIT_KEYS), suite)
        for position, entry in enumerate(_entries(table, "limit"), start=1)
    )
    waivers = tuple(
        _waiver(Table(entry, f"{file.name}, waiver {position}", _WAIVER_KEYS), suite)
        for position, entry in enumerate(_entries(table, "waiver"), start=1)
    )
    return Policy(file.name.removesuffix(".toml"), suite, default, limits, waivers)


def check_version(name: str, version: object) -> None:
    """Raise WorkloadError unless this flexq-bench reads policies of this version."""
    # Before all else: the keys of another version are not ours to judge.
    if version is None:
        raise WorkloadError(f"{name}: version is missing: begin with version = {VERSION}")
    if version != VERSION or isinstance(version, bool):
        raise WorkloadError(
            f"{name}: version is {version!r}, this flexq-bench reads {VERSION}: upgrade one of them"
        )


def _suite(
    table: Table, file: Traversable, locate: Callable[[Path], Path], suites: Traversable | None
) -> Suite:
    name = table.text("suite")
    with table.blame("suite"):
        if not is_path(name):
            return load_suite(name, suites)
        beside = isinstance(file, Path) and name.endswith(".toml")
        path = file.parent / name if isinstance(file, Path) and beside else Path(name)
        return load_suite(locate(path))


def _entries(table: Table, key: str) -> tuple[dict[str, object], ...]:
    return table.tables(key) if key in table else ()


def _limit(table: Table, suite: Suite) -> Limit:
    return Limit(
        _kernels(table, suite), table.number("slower_percent"), table.text("owner", default="")
    )


def _waiver(table: Table, suite: Suite) -> Waiver:
    return Waiver(
        kernels=_kernels(table, suite),
        reason=table.text("reason"),
        owner=table.text("owner"),
        expires=table.day("expires"),
        shapes=_shapes(table),
        m=_sizes(table),
    )


def _kernels(table: Table, suite: Suite) -> tuple[str, ...]:
    """Labels and globs. A limit of a kernel that nobody measures would guard nothing; a glob that
    fits nothing is said when the gate knows its plan."""
    patterns = table.texts("kernels")
    with table.blame("kernels"):
        for pattern in patterns:
            check_pattern(pattern)
            # Floors come with every plan, whatever the suite.
            if not is_glob(pattern) and not is_probe(pattern):
                suite.restrict(kernels=(pattern,))
    return patterns


def _shapes(table: Table) -> tuple[tuple[int, int], ...]:
    if "shapes" not in table:
        return ()
    found = []
    for text in table.texts("shapes"):
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise table.error("shapes", "N x K, for example 4096x4096", text)
        found.append((int(match["n"]), int(match["k"])))
    return tuple(found)


def _sizes(table: Table) -> tuple[int, ...]:
    if "m" not in table:
        return ()
    with table.blame("m"):
        return parse_ranges(table.text("m"))


def _fits(patterns: tuple[str, ...], case: Case) -> bool:
    return any(matches(pattern, case.label) for pattern in patterns)

"""Policy of accepted slow-downs: a versioned TOML file of limits, owners and waivers.

version = 1
suite = "nightly"                    # a suite's name, or a .toml beside the policy
slower_percent = 2.0                 # largest accepted slow-down; 0: none
owner = "kernels"                    # optional: owner of kernels whose limit names none

[[limit]]                            # none or more; the first that matches a case counts
kernels = ["flexq-*", "flexq-*[*]"]  # labels or globs
slower_percent = 1.0
owner = "flexq"                      # optional
gpus = ["*H200*"]                    # optional, as the next three: SKUs or globs, in any case
regimes = ["sustained"]              # boost, sustained
shapes = ["4096x4096"]               # N x K
m = "1:16,256:"                      # tokens: see workloads.ranges

[[waiver]]                           # none or more: known failures, accepted until a date
kernels = ["abq-w2a8"]
m = "1,8"                            # gpus, regimes, shapes and m as of a limit
reason = "slower until the new packing lands"
owner = "abq"
expires = 2026-01-31                 # the last day on which it counts
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatchcase
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from flexq_bench.workloads.case import Case
from flexq_bench.workloads.data_files import (
    Amount,
    AnyText,
    Count,
    DataTable,
    Day,
    Entries,
    FormError,
    Text,
    Texts,
    error_prefix,
    parsed_text,
    parsed_texts,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import check_patterns, is_glob, matches_any, matches_any_gpu
from flexq_bench.workloads.probes import is_probe
from flexq_bench.workloads.ranges import check_sizes
from flexq_bench.workloads.suite import Suite, has_value
from flexq_bench.workloads.suites import Regimes, load_suite

VERSION = 1
_SHAPE = re.compile(r"(?P<n>[0-9]{1,18})x(?P<k>[0-9]{1,18})")


def _parse_shapes(texts: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    shapes = []
    for text in texts:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise FormError("N x K, for example 4096x4096", text)
        shapes.append((int(match["n"]), int(match["k"])))
    return tuple(shapes)


def _parse_parameters(value: object) -> object:
    """Check a table of words or sizes, as `context = "1024:"`, `layout = "paged"`."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormError("a table of words or sizes by parameter", value)
    for text in value.values():
        if text[:1].isdigit():
            check_sizes(text)
    return value


Parameters = Annotated[dict[str, str], BeforeValidator(_parse_parameters)]
Patterns = Annotated[tuple[str, ...], parsed_texts(check_patterns)]


class _Selection(DataTable):
    """Cases on devices. gpus: globs of SKUs; empty: all.

    operations: names or globs. shapes: (N, K); m: tokens. parameters: words or sizes by name; cases
    of operations without one of these parameters are not selected.
    """

    kernels: Patterns
    gpus: Texts = ()
    regimes: Regimes = ()
    shapes: Annotated[tuple[tuple[int, int], ...], parsed_texts(_parse_shapes)] = ()
    m: Annotated[str, parsed_text(check_sizes)] = ""
    operations: Texts = ()
    parameters: Parameters = Field(default_factory=dict)

    def fits(self, case: Case) -> bool:
        """Return True if a case is selected, on a device that is (`is_on`)."""
        values = dict(case.workload.values)
        limits = self.parameters | ({"m": self.m} if self.m else {})
        return (
            matches_any(self.kernels, case.label)
            and (not self.regimes or case.regime in self.regimes)
            and (
                not self.operations or any(fnmatchcase(case.operation, p) for p in self.operations)
            )
            and (not self.shapes or (values.get("n"), values.get("k")) in self.shapes)
            and limits.keys() <= values.keys()
            and all(has_value(limits, name, value) for name, value in values.items())
        )

    def is_on(self, gpus: Iterable[str]) -> bool:
        """Return True if one of these SKUs is selected."""
        return not self.gpus or matches_any_gpu(self.gpus, gpus)

    @property
    def name(self) -> str:
        """Readable name, for example `abq-w2a8 4096x4096 m=1,8 sustained on *H200*`."""
        shapes = [f"{n}x{k}" for n, k in self.shapes]
        sizes = [f"m={self.m}"] if self.m else []
        sizes += [*self.operations, *(f"{name}={text}" for name, text in self.parameters.items())]
        gpus = [f"on {','.join(self.gpus)}"] if self.gpus else []
        return " ".join((",".join(self.kernels), *shapes, *sizes, *self.regimes, *gpus))


class Limit(_Selection):
    """The largest accepted slow-down of these cases in percent, and their owner."""

    slower_percent: Amount
    owner: AnyText = ""


class Waiver(_Selection):
    """Known slow-down of cases, accepted until the end of `expires`."""

    reason: Text
    owner: Text
    expires: Day

    def has_expired(self, today: date) -> bool:
        return today > self.expires


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy named after its file."""

    name: str
    suite: Suite
    default: Limit
    limits: tuple[Limit, ...] = ()
    waivers: tuple[Waiver, ...] = ()

    def on(self, gpu: str) -> Policy:
        """Return the policy with the limits and waivers that apply on a GPU, by its SKU."""
        return replace(
            self,
            limits=tuple(limit for limit in self.limits if limit.is_on((gpu,))),
            waivers=tuple(waiver for waiver in self.waivers if waiver.is_on((gpu,))),
        )

    def limit_of(self, case: Case) -> Limit:
        """Return the first limit that matches the case, else the default."""
        return next((limit for limit in self.limits if limit.fits(case)), self.default)

    def owner_of(self, case: Case) -> str:
        return self.limit_of(case).owner or self.default.owner

    def owner_of_label(self, label: str, gpus: Sequence[str] = ()) -> str:
        """Return the owner of a kernel by its label and GPUs; empty: the policy names none.

        gpus: SKUs; empty: any.
        """
        fitting = (
            limit
            for limit in self.limits
            if matches_any(limit.kernels, label) and (not gpus or limit.is_on(gpus))
        )
        return next(fitting, self.default).owner or self.default.owner

    def waiver_of(self, case: Case, today: date) -> Waiver | None:
        """Return the first unexpired waiver that matches the case."""
        fitting = (w for w in self.waivers if w.fits(case) and not w.has_expired(today))
        return next(fitting, None)


class _PolicyTable(DataTable):
    """A policy file, as described in the module's docstring."""

    version: Count
    suite: Text
    slower_percent: Amount
    owner: AnyText = ""
    limit: Entries[Limit] = ()
    waiver: Entries[Waiver] = ()


def load_policy(name_or_path: str) -> Policy:
    """Load a bundled policy by name, or any policy by the path of its `.toml`.

    Raises WorkloadError if there is none, or if the file is malformed: the message names the file,
    the entry and the key.
    """
    return read_policy(find_policy(name_or_path))


def is_path(name_or_path: str) -> bool:
    """Return True if a policy or a suite is given by a path instead of a name."""
    return name_or_path.endswith(".toml") or os.sep in name_or_path


def find_policy(name_or_path: str, folder: str = "policies") -> Traversable:
    """Return the file of a policy. folder: of the bundled policies of this kind.

    Raises WorkloadError if there is none of this name.
    """
    if is_path(name_or_path):
        return Path(name_or_path)
    files = (resources.files("flexq_bench") / "ci" / folder).iterdir()
    bundled = {f.name.removesuffix(".toml"): f for f in files if f.name.endswith("toml")}
    if name_or_path not in bundled:
        message = unknown("policy", name_or_path, sorted(bundled))
        raise WorkloadError(f"{message}; or give a .toml file")
    return bundled[name_or_path]


def _same_path(path: Path) -> Path:
    return path


def read_policy(
    file: Traversable,
    *,
    locate: Callable[[Path], Path] = _same_path,
    suites: Traversable | None = None,
) -> Policy:
    """Read the policy of a file; errors as load_policy.

    locate: maps the path of a suite's file to the path to read. suites: folder of suites given by
    name; None: the bundled ones.
    """
    values = read_toml(file)
    check_version(file.name, values.get("version"))
    table = validated(_PolicyTable, values, file.name)
    with error_prefix(f"{file.name}: suite"):
        suite = _suite(table.suite, file, locate, suites)
    for kind, lists in (
        ("limit", [limit.kernels for limit in table.limit]),
        ("waiver", [waiver.kernels for waiver in table.waiver]),
    ):
        for position, kernels in enumerate(lists, start=1):
            with error_prefix(f"{file.name}, {kind} {position}: kernels"):
                _check_measured(kernels, suite)
    default = Limit(kernels=("*",), slower_percent=table.slower_percent, owner=table.owner)
    return Policy(file.name.removesuffix(".toml"), suite, default, table.limit, table.waiver)


def check_version(name: str, version: object) -> None:
    """Raise WorkloadError unless this flexq-bench supports the version."""
    # Checked before the other keys, which may differ in another version.
    if version is None:
        raise WorkloadError(f"{name}: version is missing: begin with version = {VERSION}")
    if version != VERSION or isinstance(version, bool):
        raise WorkloadError(
            f"{name}: version is {version!r}, this flexq-bench reads {VERSION}: upgrade one of them"
        )


def _suite(
    name: str, file: Traversable, locate: Callable[[Path], Path], suites: Traversable | None
) -> Suite:
    if not is_path(name):
        return load_suite(name, suites)
    beside = isinstance(file, Path) and name.endswith(".toml")
    path = file.parent / name if isinstance(file, Path) and beside else Path(name)
    return load_suite(locate(path))


def _check_measured(patterns: tuple[str, ...], suite: Suite) -> None:
    """Raise WorkloadError for a label that the suite does not measure, as it would never apply.

    Globs without a match are reported by the gate, which knows its plan.
    """
    for pattern in patterns:
        # Probes are part of every plan, whatever the suite.
        if not is_glob(pattern) and not is_probe(pattern):
            suite.restrict(kernels=(pattern,))

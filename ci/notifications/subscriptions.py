"""Notification subscriptions: a versioned TOML file of receivers and their filters.

version = 1
policy = "default"                 # optional: the policy that names the owners of kernels

[[subscription]]
name = "flexq-slack"               # in the outbox; the database does not store the URL
url_env = "FLEXQ_BENCH_SLACK_URL"  # the variable that has Apprise's URL of the receiver
secret_env = "FLEXQ_BENCH_HOOK_KEY"  # optional, of webhooks: the variable that has the HMAC key
owner = "flexq"                    # optional: only kernels that the policy assigns to this owner
kernels = ["flexq-*"]              # optional: only kernels of these labels or globs
gpus = ["NVIDIA H200"]             # optional: only GPUs of these SKUs or globs
severity = "warning"               # optional: this or worse; default: info
kinds = ["alert", "gate"]          # optional: default: alert, improvement, gate, nightly, digest

A subscription with a filter of kernels or GPUs also gets events that name no kernel, or no GPU:
the digest, and a nightly run that is broken or late.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from flexq_bench.ci.policy import Policy, check_version, load_policy
from flexq_bench.db.outbox import EVENT_KINDS, SEVERITIES, EventInfo
from flexq_bench.workloads.data_files import (
    DataTable,
    Entries,
    Text,
    Texts,
    parsed_text,
    read_toml,
    validated,
)
from flexq_bench.workloads.errors import WorkloadError
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import matches_any, matches_any_gpu

ENVIRONMENT_VARIABLE = "FLEXQ_BENCH_SUBSCRIPTIONS"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _parse_variable(text: str) -> str:
    if not _VARIABLE.fullmatch(text):
        # The text may be the URL itself, which must not appear in a log.
        raise WorkloadError(
            "is not the name of an environment variable: put the value there, not here"
        )
    return text


def _parse_severity(text: str) -> str:
    if text not in SEVERITIES:
        raise WorkloadError(unknown("severity", text, SEVERITIES))
    return text


Variable = Annotated[str, parsed_text(_parse_variable)]


class Subscription(DataTable):
    """A receiver with filters of events; an empty filter matches all."""

    NAME_KEY = "name"

    name: Text
    url_env: Variable
    secret_env: Annotated[str, parsed_text(_parse_variable)] | None = None
    owner: Text | None = None
    kernels: Texts = ()
    gpus: Texts = ()
    severity: Annotated[str, parsed_text(_parse_severity)] = SEVERITIES[0]
    kinds: Texts = Field(default=tuple(kind for kind in EVENT_KINDS if kind != "test"))


class _File(DataTable):
    """A file of subscriptions, as described in the module's docstring."""

    version: int
    policy: Text | None = None
    subscription: Entries[Subscription]


@dataclass(frozen=True, slots=True)
class Subscriptions:
    """Subscriptions of a file, and the policy that defines owners; None: the file has none."""

    entries: tuple[Subscription, ...]
    policy: Policy | None

    def of(self, event: EventInfo) -> list[Subscription]:
        """Return the subscriptions that match an event."""
        return [subscription for subscription in self.entries if self._matches(subscription, event)]

    def _matches(self, subscription: Subscription, event: EventInfo) -> bool:
        if event.kind not in subscription.kinds or _rank(event.severity) < _rank(
            subscription.severity
        ):
            return False
        if subscription.gpus and event.gpus and not matches_any_gpu(subscription.gpus, event.gpus):
            return False
        labels = [
            label
            for label in event.kernels
            if not subscription.kernels or matches_any(subscription.kernels, label)
        ]
        if subscription.owner is not None:
            labels = [label for label in labels if self._owner(label, event) == subscription.owner]
        return bool(labels) or not event.kernels

    def _owner(self, label: str, event: EventInfo) -> str:
        return "" if self.policy is None else self.policy.owner_of_label(label, event.gpus)


def load_subscriptions(path: str | Path) -> Subscriptions:
    """Load a file. Raises WorkloadError, which names the file, the entry and the key."""
    file = Path(path)
    values = read_toml(file)
    check_version(file.name, values.get("version"))
    table = validated(_File, values, file.name)
    names = [subscription.name for subscription in table.subscription]
    for name in names:
        if names.count(name) > 1:
            raise WorkloadError(f"{file.name}: two subscriptions are called {name!r}: rename one")
    for subscription in table.subscription:
        for kind in subscription.kinds:
            if kind not in EVENT_KINDS:
                raise WorkloadError(
                    f"{file.name}, {subscription.name}: {unknown('kind', kind, EVENT_KINDS)}"
                )
        if subscription.owner is not None and table.policy is None:
            raise WorkloadError(
                f"{file.name}, {subscription.name}: owner needs a policy: "
                "name it at the top, policy = …"
            )
    policy = None if table.policy is None else load_policy(_policy_path(file, table.policy))
    return Subscriptions(table.subscription, policy)


def _policy_path(file: Path, policy: str) -> str:
    return str(file.parent / policy) if policy.endswith(".toml") else policy


def _rank(severity: str) -> int:
    return SEVERITIES.index(severity)

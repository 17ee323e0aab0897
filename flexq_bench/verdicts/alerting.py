"""Which verdicts belong to one alert, which alert that is, and when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from db.decisions import OPEN_STATES
from db.queries import AlertRow, DecisionRow
from db.records import CommitInfo
from flexq_bench.verdicts.detector import Judged
from flexq_bench.verdicts.families import kernel_family
from flexq_bench.verdicts.verdict import Verdict

_NOT_WORSE = (Verdict.SAME, Verdict.FASTER)


@dataclass(frozen=True, slots=True)
class Group:
    """Verdicts that say the same: something got worse in this family between these commits.

    members: uuids of their decisions.
    """

    family: str
    good: CommitInfo
    bad: CommitInfo
    members: tuple[str, ...]


def groups_of(judged: Mapping[str, Judged], commits: Mapping[str, CommitInfo]) -> list[Group]:
    """The verdicts that alert somebody, by commit range and family, the narrowest range first.

    judged: by the uuid of the decision. A commit compared with itself alerts nobody, nor does a
    cause in the environment.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for uuid, one in judged.items():
        if one.is_worse and not one.is_canary:
            key = (one.compared.base, one.compared.head, kernel_family(one.case.kernel))
            found.setdefault(key, []).append(uuid)
    groups = [
        Group(family, commits[base], commits[head], tuple(members))
        for (base, head, family), members in found.items()
    ]
    return sorted(groups, key=_width)


def alert_of(group: Group, alerts: Sequence[AlertRow]) -> AlertRow | None:
    """The stored alert that a group belongs to; None: it is a new one.

    alerts: of the group's family. A range that somebody has decided about stays decided: the same
    one again joins its alert, whatever state that is in. An open alert is joined also by a range
    that shares a commit with its own, so that a later night tells of the same thing once.
    """
    for alert in alerts:
        same_base = alert.good is not None and alert.good.sha == group.good.sha
        if same_base and alert.bad.sha == group.bad.sha:
            return alert
    for alert in alerts:
        if alert.state in OPEN_STATES and _overlaps(group, alert):
            return alert
    return None


def is_fixed(alert: AlertRow, latest: Mapping[int, DecisionRow]) -> bool:
    """Whether every series of an alert is back at the level of its last good commit.

    latest: by series, the newest decision that has that commit as its base. Each must be about a
    commit after the first bad one, and say same or faster.
    """
    if not alert.series:
        return False
    return all(
        series in latest
        and latest[series].verdict in _NOT_WORSE
        and _is_after(latest[series], alert)
        for series in alert.series
    )


def _is_after(decision: DecisionRow, alert: AlertRow) -> bool:
    if decision.head_order is None or alert.bad.topo_order is None:
        return False
    return decision.head_order > alert.bad.topo_order


def _overlaps(group: Group, alert: AlertRow) -> bool:
    """Whether the ranges (good, bad] share a commit, as far as their order is known."""
    if alert.bad.sha == group.bad.sha or (alert.good and alert.good.sha == group.good.sha):
        return True
    good = 0 if alert.good is None else alert.good.topo_order
    orders = (good, alert.bad.topo_order, group.good.topo_order, group.bad.topo_order)
    if None in orders:
        return False
    alert_good, alert_bad, group_good, group_bad = (order or 0 for order in orders)
    return group_good < alert_bad and alert_good < group_bad


def _width(group: Group) -> tuple[int, str, str]:
    ends = (group.good.topo_order, group.bad.topo_order)
    width = 0 if None in ends else (ends[1] or 0) - (ends[0] or 0)
    return (width, group.family, group.bad.sha)

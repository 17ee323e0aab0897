"""Storage of verdicts: decisions with their evidence, and the A/A calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from flexq_bench.db import queries
from flexq_bench.db.decisions import DecisionInfo, add_decisions
from flexq_bench.db.engine import Session
from flexq_bench.db.identity import fingerprint, name_uuid
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.packages import without_collection
from flexq_bench.verdicts import alert_rule
from flexq_bench.verdicts.alert_rule import Group, kernel_family
from flexq_bench.verdicts.alerts import AlertChange, judge_open_alerts, open_or_join_alerts
from flexq_bench.verdicts.case_comparison import CaseComparison
from flexq_bench.verdicts.detector import Judged, judge_together
from flexq_bench.verdicts.noise_calibration import update_calibration
from flexq_bench.workloads.case import Case

_MEASURED = ("case", "base_binary", "head_binary", "base_config", "head_config", "detail")


class ComparisonDevice(Protocol):
    """The device that both commits ran on: a flexq_bench.runs.machine.Machine."""

    @property
    def device(self) -> DeviceInfo: ...

    def series_of(self, case: Case) -> dict[str, Any]:
        """The identity of the series of the case's times on this device."""


@dataclass(frozen=True, slots=True)
class Night:
    """Verdicts in the order of the comparisons, ids of the alerts that they opened or joined, and
    alerts that moved or ended.
    """

    judged: tuple[Judged, ...]
    opened: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    changed: tuple[AlertChange, ...] = ()

    @property
    def fixed(self) -> tuple[int, ...]:
        """Ids of the alerts whose series are all back at their level."""
        return tuple(change.alert for change in self.changed if change.state == "fixed")


@without_collection()  # of samples
def record_night(
    session: Session,
    comparisons: Sequence[CaseComparison],
    machine: ComparisonDevice,
    commits: Mapping[str, CommitInfo],
    *,
    alerting: bool,
    devices: Sequence[DeviceInfo] = (),
    at: datetime | None = None,
) -> Night:
    """Judge comparisons together and store the verdicts.

    A comparison whose measured numbers were judged before changes nothing and opens no alert again.

    commits: by sha, every base and head. devices: that measured each comparison, all of the
    machine's kind; empty: the machine's device. alerting: open, join and close alerts; False for
    commits outside the watched branch, such as a pull request. at None: now. Comparisons of a
    commit with itself are stored in the A/A calibration.
    """
    moment = at or datetime.now(UTC)
    series = [machine.series_of(compared.case) for compared in comparisons]
    judged = judge_together(
        comparisons,
        noise_floors=queries.noise_floors(session, series),
        weight_bits=[identity["weight_bits"] for identity in series],
    )
    used = devices or [machine.device] * len(comparisons)
    infos = [
        _decision(result, identity, device, commits, moment, watched=alerting)
        for result, identity, device in zip(judged, series, used, strict=True)
    ]
    stored = add_decisions(session, infos)
    new = {
        info.uuid: result for info, result in zip(infos, judged, strict=True) if info.uuid in stored
    }
    canaries = {uuid for uuid, result in new.items() if result.is_canary}
    if canaries:
        update_calibration(session, at=moment, new=canaries)
    if not alerting:
        return Night(tuple(judged))
    opened, joined = open_or_join_alerts(session, _groups(session, new, commits), moment)
    projects = {info.project for info in commits.values()}
    changed = judge_open_alerts(session, moment, projects=projects)
    return Night(tuple(judged), opened, joined, changed)


def _decision(
    judged: Judged,
    series: Mapping[str, object],
    device: DeviceInfo,
    commits: Mapping[str, CommitInfo],
    at: datetime,
    *,
    watched: bool,
) -> DecisionInfo:
    evidence = judged.evidence.as_dict()
    compared, confirmation = judged.compared, judged.confirmation
    # Identified by the measured numbers, not by the parameters: the noise floor changes every day.
    measured = {name: evidence[name] for name in _MEASURED}
    measured["comparison"] = evidence["comparison"] | {"noise_floor": None}
    name = " ".join(
        (
            f"{alert_rule.DETECTOR} {alert_rule.DETECTOR_VERSION} {compared.base} {compared.head}",
            f"{device.uuid} {fingerprint(measured)}",
        )
    )
    return DecisionInfo(
        uuid=name_uuid(name),
        series=series,
        base=commits[compared.base],
        head=commits[compared.head],
        device=device,
        watched=watched,
        detector=alert_rule.DETECTOR,
        detector_version=alert_rule.DETECTOR_VERSION,
        parameters=alert_rule.PARAMETERS,
        evidence=evidence,
        verdict=confirmation.verdict.value,
        cause=confirmation.cause.value,
        reason=confirmation.reason,
        log_ratio=finite(confirmation.log_ratio),
        log_ratio_low=finite(confirmation.low),
        log_ratio_high=finite(confirmation.high),
        created_at=at,
        rule=alert_rule.RULE,
        numbers={
            "p_value": finite(confirmation.p_value),
            "smallest_change": finite(confirmation.smallest_change),
            "blocks": confirmation.blocks,
            "placements": confirmation.placements,
            "slow_placements": None
            if confirmation.modes is None
            else [confirmation.modes.slow_base, confirmation.modes.slow_head],
            **({"sandbox": compared.sandbox} if compared.sandbox else {}),
        },
    )


def _groups(
    session: Session, judged: Mapping[str, Judged], commits: Mapping[str, CommitInfo]
) -> list[Group]:
    """The verdicts that open alerts, by commit range and family, the narrowest range first.

    judged: by the uuid of the decision. A commit compared with itself opens none.
    """
    members: dict[tuple[str, str, str], list[str]] = {}
    for decision, verdict in judged.items():
        if verdict.is_worse and not verdict.is_canary:
            compared = verdict.compared
            key = (compared.base, compared.head, kernel_family(verdict.case.kernel))
            members.setdefault(key, []).append(decision)
    rows = {sha: _row(session, commits[sha]) for key in members for sha in key[:2]}
    groups = [
        Group(family, rows[base], rows[head], tuple(uuids))
        for (base, head, family), uuids in members.items()
    ]
    return sorted(groups, key=_width)


def _row(session: Session, commit: CommitInfo) -> queries.CommitRow:
    """Return a commit with its place in the history; it is stored with its decision."""
    row = queries.commit_row(session, commit.sha, project=commit.project)
    return row or queries.CommitRow(commit.sha, None, commit.subject, commit.author, commit.project)


def _width(group: Group) -> tuple[int, str, str]:
    ends = (group.good.topo_order, group.bad.topo_order)
    width = 0 if None in ends else (ends[1] or 0) - (ends[0] or 0)
    return (width, group.family, group.bad.sha)


def finite(value: float) -> float | None:
    """Return a number as the database stores it: None (null) if it is not finite."""
    return value if math.isfinite(value) else None

"""Decisions, alerts and A/A calibrations: their plain values, and functions that write them.

Each call takes the writer's lock, like db.store.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import insert_rows, lock_for_writing
from flexq_bench.db.encoding import canonical
from flexq_bench.db.errors import NotFoundError, RecordError, StaleError
from flexq_bench.db.identity import canonical_json, fingerprint
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.db.tables import (
    Alert,
    AlertEvent,
    Base,
    Commit,
    Decision,
    DecisionEvidence,
    EpochBreak,
    FalseAlarmRate,
    Noise,
)
from flexq_bench.db.writer import Writer

OPEN_STATES = (
    "new",  # not yet reviewed
    "acknowledged",  # under investigation
)
CLOSED_STATES = (
    "explained",  # intended or accepted: the series start a new epoch
    "fixed",  # the level has returned
    "false-alarm",  # no real change
    "ended",  # its evidence no longer stands; set by the service, whose note gives the reason
)
ALERT_STATES = OPEN_STATES + CLOSED_STATES
STATES_OF_PEOPLE = tuple(state for state in ALERT_STATES[1:] if state != "ended")
STATES_WITH_A_REASON = ("explained", "false-alarm")  # a note must give the reason
_FIRST_STATE = ALERT_STATES[0]


@dataclass(frozen=True, slots=True)
class DecisionInfo:
    """Verdict on one series between two commits, with its exact inputs.

    series: the identity of the series, all columns that db.writer.series_identity returns. watched:
    True on the watched branch; only such decisions open and close alerts. evidence: JSON values
    without NaN and infinities; its fingerprint is the input hash. log_ratio: ln(head / base); low,
    high: one-sided 99 % bounds; None: nothing was judged, or no ratio. rule: in words. numbers:
    all others of the verdict by name, JSON values as of the evidence.
    """

    uuid: str
    series: Mapping[str, Any]
    base: CommitInfo
    head: CommitInfo
    device: DeviceInfo
    watched: bool
    detector: str
    detector_version: int
    parameters: Mapping[str, Any]
    evidence: Mapping[str, Any]
    verdict: str
    cause: str
    reason: str
    log_ratio: float | None
    log_ratio_low: float | None
    log_ratio_high: float | None
    created_at: datetime
    rule: str
    numbers: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NoiseInfo:
    """Noise of a series. Sigmas are of ln(head / base); None: too little data."""

    series_id: int
    computed_at: datetime
    decisions: tuple[str, ...]  # uuids of the comparisons it was estimated from
    placements: int
    blocks: int
    block_sigma: float | None
    placement_sigma: float | None
    comparison_sigma: float | None
    estimate_sigma: float
    noise_floor: float | None
    smallest_step: float | None


@dataclass(frozen=True, slots=True)
class FalseAlarmInfo:
    """Rate at which canaries (a commit compared with itself) were judged slower or faster."""

    since: datetime
    until: datetime
    decisions: tuple[str, ...]  # uuids of the canaries
    alarms: int
    rate: float  # alarms per canary
    low: float  # bounds of the interval at `confidence`
    high: float
    confidence: float


def add_decisions(session: Session, infos: Sequence[DecisionInfo]) -> set[str]:
    """Store decisions with their evidence; return the uuids of those that are new.

    Their commits are those of their series' project. Raises ValueError if some evidence is not
    plain JSON.
    """
    writer = Writer(session)
    of_uuids = Decision.uuid.in_({info.uuid for info in infos})
    stored = set(session.scalars(select(Decision.uuid).where(of_uuids)))
    new = {info.uuid: info for info in infos if info.uuid not in stored}
    rows = [_row(writer, info) for info in new.values()]
    writer.place_commits()
    connection = session.connection()
    insert_rows(connection, Base.metadata.tables[Decision.__tablename__], rows)
    ids = session.execute(select(Decision.id, Decision.uuid).where(of_uuids))
    insert_rows(
        connection,
        Base.metadata.tables[DecisionEvidence.__tablename__],
        [
            {
                "decision_id": decision,
                "data": zlib.compress(canonical_json(new[uuid].evidence).encode()),
            }
            for decision, uuid in ids
            if uuid in new
        ],
    )
    return set(new)


def _row(writer: Writer, info: DecisionInfo) -> dict[str, Any]:
    project = str(info.series.get("project", ""))
    base, head = (
        writer.commit(replace(canonical(commit), project=project))
        for commit in (info.base, info.head)
    )
    columns = Decision.__table__.columns
    row = {name: getattr(info, name) for name in info.__slots__ if name in columns} | {
        "series_id": writer.series(info.series),
        "base_commit_id": base,
        "head_commit_id": head,
        "device_id": writer.device(info.device),
        "parameters": dict(info.parameters),
        "numbers": dict(info.numbers),
        "input_hash": fingerprint(info.evidence),
    }
    return row | {"decided_hash": decided_hash(row)}


_DECIDED = (
    *("detector", "detector_version", "parameters", "input_hash", "verdict", "cause", "reason"),
    *("log_ratio", "log_ratio_low", "log_ratio_high", "rule", "numbers"),
)


def decided_hash(decision: Mapping[str, Any]) -> str:
    """Return the fingerprint of a verdict with its rule, numbers and words.

    decision: the columns of a decision.
    """
    return fingerprint({name: decision[name] for name in _DECIDED})


def open_alert(
    session: Session,
    family: str,
    good_sha: str,
    bad_sha: str,
    opened_at: datetime,
    *,
    project: str = "",
) -> int:
    """Return the id of the alert of this range and family, created as `new` if there is none.

    project: of both commits; empty: this repository. Raises NotFoundError unless both are stored,
    without local changes.
    """
    lock_for_writing(session.connection())
    key = _group_key(family, good_sha, bad_sha, project)
    stored_id = session.scalar(select(Alert.id).where(Alert.group_key == key))
    if stored_id is not None:
        return stored_id
    row = {
        "group_key": key,
        "family": family,
        "state": _FIRST_STATE,
        "good_commit_id": clean_commit_id(session, good_sha, project),
        "bad_commit_id": clean_commit_id(session, bad_sha, project),
        "opened_at": opened_at,
        "note": "",
    }
    alert_id = session.scalars(insert(Alert).values(row).returning(Alert.id)).one()
    _add_event(session, alert_id, _FIRST_STATE, "", "", opened_at)
    return alert_id


def move_alert(
    session: Session, alert_id: int, good_sha: str, bad_sha: str, *, note: str, at: datetime
) -> int | None:
    """Move an alert to another range of commits, with an event that says why.

    Nothing changes if another alert of its family has this range; its id is returned. Raises
    NotFoundError unless both commits are stored, without local changes.
    """
    lock_for_writing(session.connection())
    alert = _alert(session, alert_id)
    query = select(Commit.project).where(Commit.id == alert["bad_commit_id"])
    project = session.scalars(query).one()
    key = _group_key(alert["family"], good_sha, bad_sha, project)
    other = session.scalar(select(Alert.id).where(Alert.group_key == key))
    if other is not None:
        return None if other == alert_id else other
    values = {
        "group_key": key,
        "good_commit_id": clean_commit_id(session, good_sha, project),
        "bad_commit_id": clean_commit_id(session, bad_sha, project),
        "note": note,
    }
    session.execute(update(Alert).where(Alert.id == alert_id).values(values))
    _add_event(session, alert_id, alert["state"], "", note, at)
    return None


def _group_key(family: str, good_sha: str, bad_sha: str, project: str) -> str:
    of = {"project": project} if project else {}
    return fingerprint({"family": family, "good": good_sha, "bad": bad_sha} | of)


def join_alert(session: Session, alert_id: int, decision_uuids: Iterable[str]) -> None:
    """Assign decisions to an alert; those of another alert are left unchanged."""
    lock_for_writing(session.connection())
    alert = _alert(session, alert_id)
    session.execute(
        update(Decision)
        .where(Decision.uuid.in_(list(decision_uuids)), Decision.alert_id.is_(None))
        .values(alert_id=alert_id)
    )
    if alert["state"] == "explained":
        _break_epochs(session, alert_id, alert["bad_commit_id"])


def set_alert_state(
    session: Session, alert_id: int, state: str, *, person: str, note: str, at: datetime
) -> None:
    """Set the state of an alert, and record person, time and note as an event.

    person empty: the service, which alone sets `new` and `ended`. `explained` opens an epoch at the
    first bad commit in every series of the alert; any later state undoes that. Raises NotFoundError
    if there is no such alert, RecordError if the state is unknown or already set.
    """
    allowed = STATES_OF_PEOPLE if person else ALERT_STATES
    if state not in allowed:
        raise RecordError(f"an alert can't be made {state!r}, only {', '.join(allowed)}: use one")
    lock_for_writing(session.connection())
    alert = _alert(session, alert_id)
    if alert["state"] == state:
        raise RecordError(f"alert {alert_id} is {state} already: nothing to change")
    closed_at = None if state in OPEN_STATES else at
    values = {"state": state, "closed_at": closed_at, "note": note or alert["note"]}
    session.execute(update(Alert).where(Alert.id == alert_id).values(values))
    _add_event(session, alert_id, state, person, note, at)
    if state == "explained":
        _break_epochs(session, alert_id, alert["bad_commit_id"])
    else:
        session.execute(delete(EpochBreak).where(EpochBreak.alert_id == alert_id))


def add_alert_note(
    session: Session, alert_id: int, *, person: str, note: str, at: datetime
) -> None:
    """Add a note to an alert without changing its state.

    The note becomes the alert's current note; earlier notes stay in its events. Raises
    NotFoundError, RecordError if the note is empty.
    """
    if not note.strip():
        raise RecordError(f"the note on alert {alert_id} is empty: write one, or set a state")
    lock_for_writing(session.connection())
    state = _alert(session, alert_id)["state"]
    session.execute(update(Alert).where(Alert.id == alert_id).values(note=note))
    _add_event(session, alert_id, state, person, note, at)


def decide_on_alert(
    session: Session,
    alert_id: int,
    state: str,
    *,
    seen_events: int,
    person: str,
    note: str,
    at: datetime,
) -> None:
    """Set an alert's state and note, unless the alert changed since it was read.

    state: the current one adds only the note. seen_events: number of the alert's events when it was
    read. Raises StaleError if it has another number now; else like set_alert_state and
    add_alert_note.
    """
    lock_for_writing(session.connection())
    stored = _alert(session, alert_id)["state"]
    events = select(func.count()).where(AlertEvent.alert_id == alert_id)
    if session.scalars(events).one() != seen_events:
        raise StaleError(
            f"alert {alert_id} was changed meanwhile and is {stored}: reload the page, read its "
            "events, and decide again"
        )
    if state == stored:
        add_alert_note(session, alert_id, person=person, note=note, at=at)
    else:
        set_alert_state(session, alert_id, state, person=person, note=note, at=at)


def add_noise(session: Session, info: NoiseInfo) -> bool:
    """Store the noise of a series; return False if one from the same decisions is stored."""
    row = _without(info, "decisions") | {"comparisons": len(info.decisions)}
    return _add_derived(session, Noise, row, {"decisions": sorted(info.decisions)})


def add_false_alarm_rate(session: Session, info: FalseAlarmInfo) -> bool:
    """Store the rate; return False if one of the same canaries is stored."""
    row = _without(info, "decisions") | {"canaries": len(info.decisions)}
    return _add_derived(session, FalseAlarmRate, row, {"decisions": sorted(info.decisions)})


def _add_derived(
    session: Session, table: type[Base], row: dict[str, Any], inputs: Mapping[str, Any]
) -> bool:
    lock_for_writing(session.connection())
    columns = table.__table__.columns
    row["input_hash"] = fingerprint(inputs)
    same = [columns["input_hash"] == row["input_hash"]]
    if "series_id" in row:
        same.append(columns["series_id"] == row["series_id"])
    if session.scalar(select(columns["id"]).where(*same)) is not None:
        return False
    session.execute(insert(table).values(row))
    return True


def _without(info: NoiseInfo | FalseAlarmInfo, excluded: str) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__slots__ if name != excluded}


def _alert(session: Session, alert_id: int) -> Mapping[str, Any]:
    query = select(*Alert.__table__.columns).where(Alert.id == alert_id)
    row = session.execute(query).mappings().one_or_none()
    if row is None:
        last = session.scalar(select(func.max(Alert.id)))
        there = f"the last one is {last}" if last else "there are none yet"
        raise NotFoundError(
            f"no alert {alert_id}: {there}, `flexq-bench alerts list` shows those that are open"
        )
    return dict(row)


def _break_epochs(session: Session, alert_id: int, commit_id: int) -> None:
    known = select(EpochBreak.series_id).where(EpochBreak.alert_id == alert_id)
    series = session.scalars(
        select(Decision.series_id)
        .where(
            Decision.alert_id == alert_id,
            Decision.series_id.is_not(None),
            Decision.series_id.not_in(known),
        )
        .distinct()
    ).all()
    rows = [{"series_id": s, "commit_id": commit_id, "alert_id": alert_id} for s in series]
    if rows:
        session.execute(insert(EpochBreak), rows)


def _add_event(
    session: Session, alert_id: int, state: str, person: str, note: str, at: datetime
) -> None:
    row = {"alert_id": alert_id, "state": state, "person": person, "note": note, "created_at": at}
    session.execute(insert(AlertEvent).values(row))


def clean_commit_id(session: Session, sha: str, project: str) -> int:
    """Return the id of a commit without local changes. Raises NotFoundError."""
    query = select(Commit.id).where(Commit.sha == sha, ~Commit.dirty, Commit.project == project)
    commit_id = session.scalar(query)
    if commit_id is None:
        of = f" of project {project}" if project else ""
        raise NotFoundError(f"no commit {sha}{of} is stored: name another database with --db")
    return commit_id

"""Storing the results of a file: in transactions that are short, so that other writers go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.records import CommitInfo
from flexq_bench.db.store import put_records
from flexq_bench.exchange.external.records import Origin, commit_in_file, external_records
from flexq_bench.exchange.external.result import Reading, Refused

COMMIT_DIGITS = (40, 64)  # hexadecimal, of a whole SHA-1 and SHA-256
_A_TRANSACTION = 1_000  # results

Commits = Mapping[str, CommitInfo]  # by the sha in a file


@dataclass(slots=True)
class Imported:
    """Outcome of the import of a file.

    read: valid ones; added, replaced: of these; the others were stored before. refused: their
    names and reasons. series: ids of those that changed. runs: uuids. without_device: number, on
    this machine as the file describes it. remarks: on the quality of results, and how many have
    each. has_questions: samples of some are values by question.
    """

    read: int = 0
    added: int = 0
    replaced: int = 0
    refused: list[Refused] = field(default_factory=list)
    series: set[int] = field(default_factory=set)
    runs: set[str] = field(default_factory=set)
    without_device: int = 0
    machine: str = ""
    remarks: Counter[str] = field(default_factory=Counter)
    has_questions: bool = False


def full_commits(database: Database, project: str, commits: Collection[CommitInfo]) -> Commits:
    """Complete abbreviated commits by those that are stored; describe of `store_readings`."""
    known = {}
    with database.session() as session:
        for commit in commits:
            known[commit.sha] = commit
            if len(commit.sha) not in COMMIT_DIGITS:
                stored = queries.recent_commits(
                    session, limit=0, prefixes=[commit.sha], project=project
                )
                if stored:
                    known[commit.sha] = replace(commit, sha=stored[0].sha)
    return known


def store_readings(
    database: Database,
    readings: Iterable[Reading],
    origin: Origin,
    describe: Callable[[Collection[CommitInfo]], Commits],
) -> Imported:
    """Store the results of a file, of all its commits.

    A result of a stored series, commit and occasion replaces it, or changes nothing if it is equal.
    So an import that was interrupted is completed by repeating it. describe: completes commits by
    what is known of them. Raises InfrastructureError if the database stays unavailable.
    """
    done = Imported()
    known: dict[str, CommitInfo] = {}
    for reading in readings:
        named = {
            commit.sha: commit
            for result in reading.results
            if (commit := commit_in_file(result, reading, origin)) is not None
        }
        new = [commit for sha, commit in named.items() if sha not in known]
        known |= describe(new) if new else {}
        records, unplaced = external_records(reading, origin, known)
        done.refused += [*reading.refused, *unplaced]
        done.read += len(records)
        done.machine = done.machine or reading.machine
        done.without_device += sum(not result.device for result in reading.results)
        for start in range(0, len(records), _A_TRANSACTION):
            part = records[start : start + _A_TRANSACTION]
            with database.session() as session:
                written = put_records(session, part)
            done.added += written.added
            done.replaced += written.replaced
            done.series |= written.series
            done.runs |= {record.run.uuid for record in part}
        done.has_questions |= any(result.extra.get("questions") for result in reading.results)
        done.remarks.update(remark for result in reading.results for remark in result.remarks)
    return done

"""Backfill of missing results of earlier nights: newest first, each at its own commit."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.errors import FlexqError
from flexq_bench.repository.worktrees import worktree

_TIMEOUT_S = 4 * 3600.0  # per gap, so that a night ends before the next one

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gap:
    """An earlier night's run that lacks results on a kind of GPU that is here now."""

    night: str
    run: str  # uuid
    gpu: str
    commit: str
    missing: int


@dataclass(frozen=True, slots=True)
class FillResult:
    """Result of filling a gap. remaining: cases without a result. detail: the reason, or empty."""

    gap: Gap
    remaining: int
    detail: str = ""


# Runs a flexq-bench command in a checkout; returns its exit status and last line of errors.
Resume = Callable[[Path, Sequence[str]], tuple[int, str]]


def find_gaps(
    database: Database, suite: str, gpus: Sequence[str], *, night: str, cases: int
) -> list[Gap]:
    """Return the newest gaps before `night` with at most `cases` missing cases in total.

    Commits with local changes, outside a git tree or on no branch any more are left out.
    """
    gaps: list[Gap] = []
    with database.session() as session:
        for stored in queries.night_states(session, suite=suite):
            if stored.name >= night or stored.gpu not in gpus or stored.dirty:
                continue
            missing = len(queries.missing_cases(session, stored.run))
            if not missing or stored.commit.startswith("pkg-"):
                continue
            if queries.is_orphaned(session, stored.commit, stored.project):
                continue
            if sum(gap.missing for gap in gaps) + missing > cases:
                break
            gaps.append(Gap(stored.name, stored.run, stored.gpu, stored.commit, missing))
    return gaps


def fill_gap(
    database: Database, gap: Gap, repository: Path, options: Sequence[str], *, resume: Resume
) -> FillResult:
    """Resume the run at its commit, in a temporary checkout.

    options: of `run --resume`, such as --cluster. Failures are returned in `detail`, not raised.
    """
    log.info("filling %d cases of %s on %s", gap.missing, gap.night, gap.gpu)
    try:
        with worktree(repository, gap.commit) as folder:
            status, message = resume(folder, ("run", "--resume", gap.run, *options))
    except FlexqError as error:
        status, message = 1, str(error)
    with database.session() as session:
        remaining = len(queries.missing_cases(session, gap.run))
        if not remaining:
            [stored] = [
                n for n in queries.night_states(session, name=gap.night) if n.run == gap.run
            ]
            info = NightInfo(stored.key, stored.name, stored.suite, stored.gpu, stored.run)
            # Without comparisons: later nights compare with the bases that are trusted by then.
            set_night(session, info, "done", after="measuring", at=datetime.now(UTC))
    return FillResult(gap, remaining, message or f"exit status {status}" if remaining else "")


def resume_in(
    environment: Mapping[str, str], folder: Path, arguments: Sequence[str]
) -> tuple[int, str]:
    """Run flexq-bench from the code of a checkout, in a subprocess.

    environment: variables added to those of this process.
    """
    command = [sys.executable, "-m", "flexq_bench.cli", *arguments]
    try:
        completed = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment, "PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"stopped after {_TIMEOUT_S / 3600:.0f} hours"
    errors = [line for line in completed.stderr.splitlines() if line.strip()]
    return completed.returncode, errors[-1] if errors else ""

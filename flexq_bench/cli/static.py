"""`flexq-bench static`: store static metrics of compiled kernels, without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flexq_bench.cli.options import DbOption, JsonFileOption, KernelsOption
from flexq_bench.cli.output import console, say
from flexq_bench.cli.progress import progress
from flexq_bench.db.engine import open_database
from flexq_bench.db.store import add_records, begin_run, finish_run
from flexq_bench.errors import UsageError
from flexq_bench.kernels.runtime.machine_code import check_tools
from flexq_bench.repository.provenance import current_commit
from flexq_bench.runs.commit_history import store_history
from flexq_bench.runs.result_files import ResultFiles
from flexq_bench.sweeps.text import split_names
from flexq_bench.workloads.names import unknown
from flexq_bench.workloads.patterns import matches, select

if TYPE_CHECKING:
    from flexq_bench.results.static_series import OnStep

_ONLY_PLAIN = ("*",)  # variants are ablations, whose regressions don't matter

log = logging.getLogger(__name__)


def static(
    kernels: KernelsOption = None, db: DbOption = None, as_json: JsonFileOption = None
) -> None:
    """Store registers, spills, shared memory, occupancy and instruction counts of the kernels.

    One series a kernel, architecture and metric: of its default configuration for 1 and for 8
    tokens, and the worst of each resource over all its builds. Storing the same commit twice
    changes nothing. Default: every kernel without a variant.
    """
    from flexq_bench.kernels.runtime.occupancy import TARGETS
    from flexq_bench.results import static_series as series

    files = ResultFiles(as_json)
    check_tools()
    chosen = _chosen(split_names(kernels) or _ONLY_PLAIN)
    commit = current_commit()
    with open_database(db) as database:
        with _progress(len(chosen)) as on_step:
            values = list(series.static_values(chosen, TARGETS, on_step))
        run = series.static_run(commit, values)
        store_history(database, commit)
        with database.session() as session:
            run = begin_run(session, run, commit)
            records = [series.static_record(value, run, commit) for value in values]
            added = add_records(session, records)
            finish_run(session, run.uuid, "complete")
        files.write(records)
        out = console(stderr=files.uses_stdout)
        say(
            out,
            f"{added} of {len(records)} values of {len(chosen)} kernels are new in {database.url}",
        )
        if commit.dirty:
            say(out, "the tree has local changes: its values enter no history")


def _chosen(patterns: tuple[str, ...]) -> tuple[str, ...]:
    from flexq_bench.results.static_series import kernels_with_code

    known = kernels_with_code()
    for pattern in patterns:
        if not any(matches(pattern, label) for label in known):
            raise UsageError(unknown("kernel with code of ours", pattern, known))
    return select(patterns, known)


@contextmanager
def _progress(total: int) -> Iterator[OnStep]:
    with progress("compiling", total) as bar:

        def advance(label: str) -> None:
            log.info("compiling %s", label)
            bar.advance(label)

        yield advance

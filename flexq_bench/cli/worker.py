"""`flexq-bench worker`: serve requests from the dashboard and `sweep --queue`."""

from __future__ import annotations

import logging
import time
from typing import Annotated

import typer

from flexq_bench.cli.external import KernelsFromOption, use_kernels_from
from flexq_bench.cli.option_groups import takes_option_groups
from flexq_bench.cli.options import (
    ClusterOption,
    DbOption,
    DeviceOptions,
    SeedOption,
    TimesOption,
    finite,
)
from flexq_bench.cli.output import console, say
from flexq_bench.db.engine import open_database
from flexq_bench.interrupts import ended_by_terminate
from flexq_bench.repository.provenance import ROOT, current_commit, source_hash

log = logging.getLogger(__name__)


@takes_option_groups
def worker(
    *,
    once: Annotated[
        bool,
        typer.Option("--once", help="Exit when no request is queued, instead of waiting."),
    ] = False,
    poll: Annotated[
        float,
        typer.Option(
            min=0.1, max=86_400.0, callback=finite, metavar="S", help="Seconds between two polls."
        ),
    ] = 2.0,
    kernels_from: KernelsFromOption = None,
    place: DeviceOptions,
    cluster: ClusterOption = "none",
    times: TimesOption = None,
    seed: SeedOption = 0,
    db: DbOption = None,
) -> None:
    """Measure the requests in the database one after the other, until it is stopped.

    A sweep or suite becomes a run with trigger `sweep`, which is never a baseline; a bisection
    compares commits of this clone. If a worker dies, another one continues its request. Any number
    of workers may serve one database.
    It exits when its source code changes, to be restarted by its service manager.
    """
    from flexq_bench.ci.requested_bisection import answered
    from flexq_bench.fleet import PoolOptions, open_pool
    from flexq_bench.fleet.request_worker import serve_next, server_name

    use_kernels_from(kernels_from, only=True)
    out = console()
    options = PoolOptions(cluster, place.requested_backend, place.device, seed, times=times)
    with (
        open_database(db) as database,
        open_pool(database, options, current_commit(), registers=True) as pool,
        ended_by_terminate(),
    ):
        name, sources = server_name(), source_hash(ROOT)
        kinds = ", ".join(kind.gpu for kind in pool.kinds)
        say(out, f"{name} serves {kinds} from {database.url}")
        while source_hash(ROOT) == sources:
            served = None
            pool.refresh()
            for kind in pool.kinds:
                served = served or serve_next(
                    database,
                    pool,
                    kind,
                    current_commit(),
                    name,
                    on_record=lambda record: log.info("%s: %s", record.case, record.status),
                    search=answered,
                )
            if served is not None:
                run = f", run {served.run[:8]}" if served.run else ""
                why = f": {served.detail}" if served.detail else ""
                say(out, f"request {served.request[:8]} {served.state}{run}{why}")
            elif once:
                return
            else:
                time.sleep(poll)
        say(out, "its sources changed since this worker began: start it again")

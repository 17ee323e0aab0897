"""`flexq-bench worker`: serve what people ask for, from the dashboard or with `sweep --queue`."""

from __future__ import annotations

import logging
import time
from typing import Annotated

import typer

from flexq_bench.commands.options import (
    BackendChoice,
    BackendOption,
    ClusterOption,
    DbOption,
    DeviceOption,
    SeedOption,
)

log = logging.getLogger(__name__)


def worker(
    once: Annotated[
        bool, typer.Option("--once", help="End when nothing waits, rather than wait for more.")
    ] = False,
    poll: Annotated[
        float, typer.Option("--poll", min=0.1, metavar="S", help="Seconds between two looks.")
    ] = 2.0,
    backend: BackendOption = BackendChoice.AUTO,
    device: DeviceOption = None,
    cluster: ClusterOption = "none",
    seed: SeedOption = 0,
    db: DbOption = None,
) -> None:
    """Measure the requests in the database one after the other, until it is stopped.

    Each becomes a run with trigger `sweep`, which is never a baseline. A worker that dies loses
    nothing: the next one goes on with its request. Any number of workers may serve one database.
    """
    from db.engine import open_database
    from flexq_bench.commands.measuring import Setup, open_executor
    from flexq_bench.commands.output import console, say
    from flexq_bench.commands.stopping import ended_by_terminate
    from flexq_bench.provenance import current_commit
    from flexq_bench.serving import serve_next, server_name

    out = console()
    setup = Setup(db, cluster, backend, device, seed)
    with open_database(db) as database, open_executor(setup) as executor, ended_by_terminate():
        name = server_name()
        say(out, f"{name} serves {executor.gpu} from {database.url}")
        while True:
            served = serve_next(
                database,
                executor,
                current_commit(),
                name,
                on_record=lambda record: log.info("%s: %s", record.case, record.status),
            )
            if served is not None:
                run = f", run {served.run[:8]}" if served.run else ""
                why = f": {served.detail}" if served.detail else ""
                say(out, f"request {served.request[:8]} {served.state}{run}{why}")
            elif once:
                return
            else:
                time.sleep(poll)

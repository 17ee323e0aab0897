"""`flexq-bench serve-api`: stored results as JSON; with --ingest, new ones by POST."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexq_bench.cli.listening import AddressOption, AllowHostOption, server_url
from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db.engine import Database, open_database
from flexq_bench.packages import require_extra
from flexq_bench.repository.worktrees import repository_of

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

_MAX_END_S = 10  # for requests that run when it is to end


def serve_api(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8502,
    address: AddressOption = "127.0.0.1",
    allow_host: AllowHostOption = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            metavar="URL",
            help="A site whose pages may read the answers, https://wiki.example.com; repeatable.",
        ),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A clone in which the badge looks up branches."),
    ] = None,
    ingest: Annotated[
        bool,
        typer.Option("--ingest", help="Also store results that are posted with a token."),
    ] = False,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="With --ingest: of one request.")
    ] = 64 << 20,
    rate: Annotated[
        int, typer.Option(min=1, help="With --ingest: requests of a token in a minute.")
    ] = 120,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve stored results as JSON until Ctrl-C. /openapi.json describes it.

    --ingest also stores posted results (docs/external-results.md); otherwise nothing is written.

    --json prints the address as JSON before it starts.
    """
    require_extra("serve", "serve-api")

    import uvicorn

    from flexq_bench.read_api.app import api_app
    from flexq_bench.read_api.browser_guard import DATA_POLICY, BrowserGuard, allowed_hosts
    from flexq_bench.read_api.ingest import Ingest, Limits

    tree = None if repository is None else repository_of(repository)
    url = server_url(address, port)
    with open_database(db, create=False, read_only=True) as database:
        if as_json:
            print_json({"url": url, "database": database.url, "openapi": f"{url}/openapi.json"})
        else:
            say(console(), f"{database.url} at {url}/openapi.json (Ctrl-C ends it)")
        hosts = allowed_hosts(address, allow_host or ())
        with ExitStack() as stack:
            further: Sequence[BaseRoute] = ()
            described: Mapping[str, Any] = {}
            if ingest:
                writable = stack.enter_context(open_database(db, create=False))
                limits = Limits(max_bytes=max_bytes, per_minute=rate)
                posted = Ingest(writable, partial(_judged, writable), limits)
                further, described = posted.routes(), posted.described()
            routes = api_app(database, repository=tree, further=further, described=described)
            app = BrowserGuard(routes, hosts, DATA_POLICY, allow_origin or ())
            # Senders may be gone, or silent: requests that still run then are cut off.
            uvicorn.run(
                app,
                host=address,
                port=port,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_MAX_END_S,
            )


def _judged(database: Database, series: Collection[int]) -> dict[str, Any]:
    """Judge series by their histories; return the ids of alerts that were opened or joined."""
    from flexq_bench.ci.imported_history import judge_imported

    verdicts = judge_imported(database, series)
    return {"opened_alerts": verdicts.opened, "joined_alerts": verdicts.joined}

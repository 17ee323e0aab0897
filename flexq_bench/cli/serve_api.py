"""`flexq-bench serve-api`: stored results as JSON, read-only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexq_bench.cli.listening import AddressOption, AllowHostOption, server_url
from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db.engine import open_database
from flexq_bench.packages import require_extra
from flexq_bench.repository.worktrees import repository_of


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
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve stored results as JSON, read-only, until Ctrl-C. /openapi.json describes it.

    --json prints the address as JSON before it starts.
    """
    require_extra("serve", "serve-api")

    import uvicorn

    from flexq_bench.read_api.app import api_app
    from flexq_bench.read_api.browser_guard import DATA_POLICY, BrowserGuard, allowed_hosts

    tree = None if repository is None else repository_of(repository)
    url = server_url(address, port)
    with open_database(db, create=False, read_only=True) as database:
        if as_json:
            print_json({"url": url, "database": database.url, "openapi": f"{url}/openapi.json"})
        else:
            say(console(), f"{database.url} at {url}/openapi.json (Ctrl-C ends it)")
        hosts = allowed_hosts(address, allow_host or ())
        routes = api_app(database, repository=tree)
        app = BrowserGuard(routes, hosts, DATA_POLICY, allow_origin or ())
        uvicorn.run(app, host=address, port=port, log_level="warning", access_log=False)

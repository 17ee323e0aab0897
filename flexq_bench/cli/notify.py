"""`flexq-bench notify`: send what waits in the outbox, try a receiver, tell of a late night."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.options import DATABASE, DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.errors import UsageError
from flexq_bench.exit_codes import ExitCode

if TYPE_CHECKING:
    from ci.notifications.delivery import DeliveryResult
    from ci.notifications.subscriptions import Subscriptions
    from db.engine import Database

_HOUR = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")

SubscriptionsOption = Annotated[
    Path | None,
    typer.Option(
        "--subscriptions",
        metavar="FILE",
        help="Who is told what (docs/outside-results.md). Default: $FLEXQ_BENCH_SUBSCRIPTIONS.",
        show_default=False,
        rich_help_panel=DATABASE,
    ),
]


def notify(
    subscriptions: SubscriptionsOption = None,
    test: Annotated[
        bool, typer.Option("--test", help="Send one test message to every subscription, now.")
    ] = False,
    late: Annotated[
        str | None,
        typer.Option(
            "--late",
            metavar="HH:MM",
            help="First look whether today's night was done by this hour, UTC, and tell if not.",
            show_default=False,
        ),
    ] = None,
    suite: Annotated[str, typer.Option("--suite", help="Of --late: the night's suite.")] = (
        "nightly"
    ),
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Send what is due: alerts, improvements, gates, nights, and a digest a night; once each.

    What a receiver does not take stays and is tried again by the next call, later each time.
    `nightly` does this at its end if $FLEXQ_BENCH_SUBSCRIPTIONS is set. Receivers' URLs and keys
    are read from environment variables that the file names.

    Exit code 0: all that is due was taken; 4: the night of --late is not done; 5: a receiver did
    not take its message, or its URL is not set.
    """
    from ci.notifications.delivery import deliver
    from db.engine import open_database

    if late is not None and not _HOUR.fullmatch(late):
        raise UsageError(f"--late {late}: write an hour, UTC, as 06:30")
    told = _subscriptions(subscriptions)
    if test:
        _test(told, as_json)
        return
    with open_database(db) as database:
        state = None if late is None else _late(database, suite, late)
        sent = deliver(database, told)
        if as_json:
            print_json({"database": database.url, "late": state, **_as_json(sent)})
        else:
            if state is not None:
                say(console(), state)
            _say(sent, database)
    if state is not None:
        raise typer.Exit(int(ExitCode.MISSING))
    if sent.failures or sent.unconfigured:
        raise typer.Exit(int(ExitCode.INFRASTRUCTURE))


def send_if_subscribed(database: Database) -> None:
    """Send what is due if the environment names subscriptions; a failure is a line on stderr.

    A night that is measured and stored is not lost for a receiver that is down, or a file that is
    wrong: the messages stay in the outbox.
    """
    from ci.notifications.delivery import deliver
    from ci.notifications.subscriptions import ENVIRONMENT_VARIABLE, load_subscriptions
    from flexq_bench.cli.failures import one_line
    from flexq_bench.errors import FlexqError
    from workloads.errors import WorkloadError

    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        return
    out = console(stderr=True)
    try:
        sent = deliver(database, load_subscriptions(path))
    except (WorkloadError, FlexqError) as error:
        say(out, f"nobody was told: {one_line(error)}")
        return
    for name, why in sent.failures.items():
        say(out, f"{name} was not told, and will be by flexq-bench notify: {why}")


def _subscriptions(given: Path | None) -> Subscriptions:
    from ci.notifications.subscriptions import ENVIRONMENT_VARIABLE, load_subscriptions

    path = given or os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        raise UsageError(
            f"who is to be told? Give --subscriptions FILE, or set {ENVIRONMENT_VARIABLE}"
        )
    return load_subscriptions(path)


def _test(told: Subscriptions, as_json: bool) -> None:
    from ci.notifications.channels import ChannelError, send
    from ci.notifications.events import test_delivery

    results = {}
    for one in told.entries:
        try:
            send(one, test_delivery(one.name))
            results[one.name] = "taken"
        except ChannelError as error:
            results[one.name] = str(error)
    if as_json:
        print_json(results)
    else:
        for name, result in results.items():
            say(console(), f"{name}: {result}")
    if any(result != "taken" for result in results.values()):
        raise typer.Exit(int(ExitCode.INFRASTRUCTURE))


def _late(database: Database, suite: str, hour: str) -> str | None:
    """Describe and announce once that today's nightly run is late; None: done, or not due yet."""
    from ci.late_night import check_late_night

    return check_late_night(database, suite, hour, now=datetime.now(UTC))


def _as_json(sent: DeliveryResult) -> dict[str, object]:
    return {
        "sent": sent.sent,
        "failures": sent.failures,
        "waiting": sent.waiting,
        "unconfigured": sent.unconfigured,
        "old": sent.old,
    }


def _say(sent: DeliveryResult, database: Database) -> None:
    out, errors = console(), console(stderr=True)
    messages = f"{sent.sent} message{'' if sent.sent == 1 else 's'}"
    say(out, f"sent {messages}, {sent.waiting} still wait in {database.url}")
    if sent.old:
        say(out, f"{sent.old} events are older than a week: nobody is told of them")
    for name, why in sent.failures.items():
        say(errors, f"{name}: {why}; it is tried again later")
    for name in sent.unconfigured:
        say(errors, f"{name}: the variable that its url_env names is not set here")

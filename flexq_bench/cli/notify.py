"""`flexq-bench notify`: send pending notifications, test receivers, report a late night."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexq_bench.cli.options import DbOption, JsonFlag, database_option
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db.engine import Database, open_database
from flexq_bench.errors import FlexqError, UsageError, one_line
from flexq_bench.exit_codes import ExitCode
from flexq_bench.packages import require_extra
from flexq_bench.workloads.errors import WorkloadError

if TYPE_CHECKING:
    from flexq_bench.ci.notifications.delivery import DeliveryResult
    from flexq_bench.ci.notifications.subscriptions import Subscriptions

_HOUR = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]")


def notify(
    subscriptions: Annotated[
        Path | None,
        database_option(
            metavar="FILE",
            help="File of subscriptions (docs/external-results.md). Default: "
            "$FLEXQ_BENCH_SUBSCRIPTIONS.",
        ),
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Send one test message to every subscription, now.")
    ] = False,
    late: Annotated[
        str | None,
        typer.Option(
            metavar="HH:MM",
            help="First check that today's nightly run is done by this time, UTC; notify if not.",
        ),
    ] = None,
    suite: Annotated[str, typer.Option(help="Suite of the nightly run for --late.")] = ("nightly"),
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Send due notifications once each: alerts, improvements, gates, nightly runs and digests.

    A message that a receiver does not accept is tried again by later calls, at growing intervals.
    `nightly` does this at its end if $FLEXQ_BENCH_SUBSCRIPTIONS is set. Receivers' URLs and keys
    are read from environment variables that the file names.

    Exit code 0: all due messages were accepted; 4: the nightly run of --late is not done; 5: a
    receiver did not accept its message, or its URL is not set.
    """
    require_extra("notify", "notify")

    from flexq_bench.ci.late_night import check_late_night
    from flexq_bench.ci.notifications.delivery import deliver

    if late is not None and not _HOUR.fullmatch(late):
        raise UsageError(f"--late {late}: write an hour, UTC, as 06:30")
    recipients = _subscriptions(subscriptions)
    if test:
        _test(recipients, as_json)
        return
    with open_database(db) as database:
        now = datetime.now(UTC)
        state = None if late is None else check_late_night(database, suite, late, now=now)
        sent = deliver(database, recipients)
        if as_json:
            print_json({"database": database.url, "late": state, **asdict(sent)})
        else:
            if state is not None:
                say(console(), state)
            _print_result(sent, database)
    if state is not None:
        raise typer.Exit(int(ExitCode.MISSING))
    if sent.failures or sent.unconfigured:
        raise typer.Exit(int(ExitCode.INFRASTRUCTURE))


def send_if_subscribed(database: Database) -> None:
    """Send due notifications if the environment names subscriptions; failures go to stderr.

    Nothing is raised, because the results of a night are already stored; messages stay in the
    outbox.
    """
    from flexq_bench.ci.notifications.delivery import deliver
    from flexq_bench.ci.notifications.subscriptions import ENVIRONMENT_VARIABLE, load_subscriptions

    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        return
    out = console(stderr=True)
    try:
        sent = deliver(database, load_subscriptions(path))
    except (WorkloadError, FlexqError) as error:
        say(out, f"no notification was sent: {one_line(error)}")
        return
    for name, reason in sent.failures.items():
        say(out, f"{name}: not delivered, flexq-bench notify tries again: {reason}")
    _print_unconfigured(sent)


def _subscriptions(file: Path | None) -> Subscriptions:
    from flexq_bench.ci.notifications.subscriptions import ENVIRONMENT_VARIABLE, load_subscriptions

    path = file or os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        raise UsageError(
            f"no subscriptions: give --subscriptions FILE, or set {ENVIRONMENT_VARIABLE}"
        )
    return load_subscriptions(path)


def _test(recipients: Subscriptions, as_json: bool) -> None:
    from flexq_bench.ci.notifications.channels import ChannelError, send
    from flexq_bench.ci.notifications.events import test_delivery

    results = {}
    for subscription in recipients.entries:
        try:
            send(subscription, test_delivery(subscription.name))
            results[subscription.name] = "taken"
        except ChannelError as error:
            results[subscription.name] = str(error)
    if as_json:
        print_json(results)
    else:
        for name, result in results.items():
            say(console(), f"{name}: {result}")
    if any(result != "taken" for result in results.values()):
        raise typer.Exit(int(ExitCode.INFRASTRUCTURE))


def _print_result(sent: DeliveryResult, database: Database) -> None:
    out, errors = console(), console(stderr=True)
    messages = f"{sent.sent} message{'' if sent.sent == 1 else 's'}"
    say(out, f"sent {messages}, {sent.waiting} still wait in {database.url}")
    if sent.old:
        say(out, f"{sent.old} events are older than a week: they are not sent")
    for name, reason in sent.failures.items():
        say(errors, f"{name}: {reason}; it is tried again later")
    _print_unconfigured(sent)


def _print_unconfigured(sent: DeliveryResult) -> None:
    for name in sent.unconfigured:
        say(console(stderr=True), f"{name}: the variable that its url_env names is not set here")

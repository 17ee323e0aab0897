"""`flexq-bench db token`: tokens of the ingest API."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from flexq_bench.cli.external_results import OWN_PROJECT
from flexq_bench.cli.options import DbOption, JsonFlag
from flexq_bench.cli.output import console, print_json, say
from flexq_bench.db import tokens
from flexq_bench.db.engine import Session, open_database
from flexq_bench.db.tokens import RIGHTS, AuditEntry, Token
from flexq_bench.errors import UsageError
from flexq_bench.workloads.names import unknown

app = typer.Typer(help="Tokens of serve-api --ingest, of one project each.", no_args_is_help=True)

ProjectOption = Annotated[
    str, typer.Option("--project", metavar="NAME", help=f"{OWN_PROJECT}: this repository.")
]
IdArgument = Annotated[int, typer.Argument(metavar="ID")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of its bearer, for example nightly.")],
    project: ProjectOption,
    rights: Annotated[str, typer.Option(help="read, write or admin.")] = "write",
    days: Annotated[int, typer.Option(min=1, max=3650, help="Until it expires.")] = 90,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a token and print it. It is stored only as a hash, and can't be printed again."""
    if rights not in RIGHTS:
        raise UsageError(unknown("right", rights, RIGHTS))
    now = datetime.now(UTC)
    with open_database(db) as database, database.session() as session:
        of, expires_at = _stored(project), now + timedelta(days=days)
        token, secret = tokens.create_token(
            session, of, name, rights, at=now, expires_at=expires_at
        )
        _note(session, "token-create", token, now)
    _print(token, secret, as_json)


@app.command()
def rotate(
    token_id: IdArgument,
    project: ProjectOption,
    grace_hours: Annotated[
        float, typer.Option(min=0, help="For which the old token stays valid.")
    ] = 24.0,
    db: DbOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Replace a token by a new one of the same name, rights and lifetime, and print it."""
    now = datetime.now(UTC)
    with open_database(db, create=False) as database, database.session() as session:
        grace = timedelta(hours=grace_hours)
        token, secret = tokens.rotate_token(
            session, _stored(project), token_id, at=now, grace=grace
        )
        _note(session, "token-rotate", token, now)
    _print(token, secret, as_json)


@app.command()
def revoke(token_id: IdArgument, project: ProjectOption, db: DbOption = None) -> None:
    """End a token now."""
    now = datetime.now(UTC)
    with open_database(db, create=False) as database, database.session() as session:
        tokens.revoke_token(session, _stored(project), token_id, at=now)
        entry = AuditEntry(_stored(project), "token-revoke", 200, now, {"revoked": token_id})
        tokens.add_entry(session, entry)
    say(console(), f"token {token_id} is revoked")


@app.command("list")
def list_(project: ProjectOption, db: DbOption = None, as_json: JsonFlag = False) -> None:
    """List the valid tokens of a project."""
    with open_database(db, read_only=True) as database, database.session() as session:
        valid = tokens.valid_tokens(session, _stored(project), datetime.now(UTC))
    if as_json:
        print_json(valid)
        return
    for token in valid:
        say(console(), _text(token))


def _stored(project: str) -> str:
    return "" if project == OWN_PROJECT else project


def _note(session: Session, action: str, token: Token, at: datetime) -> None:
    answer: dict[str, Any] = {"token": token.id, "name": token.name, "rights": token.rights}
    tokens.add_entry(session, AuditEntry(token.project, action, 200, at, answer))


def _print(token: Token, secret: str, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(token), "secret": secret})
        return
    say(console(stderr=True), _text(token))
    say(console(), secret)


def _text(token: Token) -> str:
    end = "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M} UTC"
    project = token.project or OWN_PROJECT
    return f"token {token.id} {token.name} of {project}: {token.rights}, expires {end}"

"""Tokens of the ingest API, and the audit of what their bearers did.

A token is 256 random bits, so that its SHA-256, which alone is stored, needs no salt.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, func, insert, or_, select, update
from sqlalchemy.orm import Session

from flexq_bench.db.dialects import lock_for_writing
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.tables import ApiRequest, ApiToken

RIGHTS = ("read", "write", "admin")  # each includes those before it
AUDIT_DAYS = 400  # after which requests, and the answers to their repetition, may be forgotten


@dataclass(frozen=True, slots=True)
class Token:
    """A token without its secret. expires_at None: never; revoked_at None: it is not revoked."""

    id: int
    project: str
    name: str
    rights: str  # one of RIGHTS
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    def may(self, right: str) -> bool:
        return RIGHTS.index(right) <= RIGHTS.index(self.rights)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A request of a bearer, or of the command line (token_id None), and its answer."""

    project: str
    action: str  # import, token-create, token-rotate, token-revoke
    status: int  # of HTTP
    created_at: datetime
    answer: Mapping[str, Any]
    token_id: int | None = None
    idempotency_key: str | None = None  # None: not given, or nothing was stored
    content_hash: str = ""
    content_bytes: int = 0
    client: str = ""  # address; empty: command line


_TOKEN = [ApiToken.__table__.columns[field.name] for field in fields(Token)]
_ENTRY = [ApiRequest.__table__.columns[field.name] for field in fields(AuditEntry)]


def create_token(
    session: Session,
    project: str,
    name: str,
    rights: str,
    *,
    at: datetime,
    expires_at: datetime | None,
) -> tuple[Token, str]:
    """Store a new token; return it, and its secret, which can't be had again."""
    secret = f"fqb_{secrets.token_urlsafe(32)}"
    row = {
        "project": project, "name": name, "rights": rights, "secret_hash": _hash(secret),
        "created_at": at, "expires_at": expires_at,
    }  # fmt: skip
    return Token(
        **session.execute(insert(ApiToken).values(row).returning(*_TOKEN)).mappings().one()
    ), secret


def rotate_token(
    session: Session, project: str, token_id: int, *, at: datetime, grace: timedelta
) -> tuple[Token, str]:
    """Replace a token by a new one of the same name, rights and lifetime.

    The old one is valid for `grace`. Raises NotFoundError if the project has no such valid token.
    """
    lock_for_writing(session.connection())
    old = next(
        (token for token in valid_tokens(session, project, at) if token.id == token_id), None
    )
    if old is None:
        raise NotFoundError(f"no valid token {token_id} of this project")
    lifetime = None if old.expires_at is None else old.expires_at - old.created_at
    end = at + grace if old.expires_at is None else min(old.expires_at, at + grace)
    session.execute(update(ApiToken).where(ApiToken.id == token_id).values(expires_at=end))
    expires_at = None if lifetime is None else at + lifetime
    return create_token(session, project, old.name, old.rights, at=at, expires_at=expires_at)


def revoke_token(session: Session, project: str, token_id: int, *, at: datetime) -> None:
    """End a token now. Raises NotFoundError if the project has no such token."""
    mine = select(ApiToken.id).where(ApiToken.id == token_id, ApiToken.project == project)
    if session.scalar(mine) is None:
        raise NotFoundError(f"no token {token_id} of this project")
    unrevoked = update(ApiToken).where(ApiToken.id == token_id, ApiToken.revoked_at.is_(None))
    session.execute(unrevoked.values(revoked_at=at))


def valid_tokens(session: Session, project: str, at: datetime) -> list[Token]:
    """Return the tokens of a project that are neither expired nor revoked, oldest first."""
    query = select(*_TOKEN).where(ApiToken.project == project, *_valid(at)).order_by(ApiToken.id)
    return [Token(**row) for row in session.execute(query).mappings()]


def token_of(session: Session, secret: str, at: datetime) -> Token | None:
    """Return the token with this secret; None: there is none, or it has expired or is revoked."""
    query = select(*_TOKEN).where(ApiToken.secret_hash == _hash(secret), *_valid(at))
    row = session.execute(query).mappings().one_or_none()
    return None if row is None else Token(**row)


def add_entry(session: Session, entry: AuditEntry) -> AuditEntry | None:
    """Store an entry of the audit, unless there is one with its idempotency key: return that.

    Entries of its project older than AUDIT_DAYS are deleted.
    """
    lock_for_writing(session.connection())
    if entry.idempotency_key is not None:
        first = entry_of_key(session, entry.project, entry.idempotency_key)
        if first is not None:
            return first
    oldest = entry.created_at - timedelta(days=AUDIT_DAYS)
    is_old = (ApiRequest.project == entry.project) & (ApiRequest.created_at < oldest)
    session.execute(delete(ApiRequest).where(is_old))
    session.execute(insert(ApiRequest).values(asdict(entry)))
    return None


def entry_of_key(session: Session, project: str, idempotency_key: str) -> AuditEntry | None:
    """Return the request of a project that had this key; None: none stored anything."""
    query = select(*_ENTRY).where(
        ApiRequest.project == project, ApiRequest.idempotency_key == idempotency_key
    )
    row = session.execute(query).mappings().one_or_none()
    return None if row is None else AuditEntry(**row)


def count_entries(session: Session, token: Token, *, since: datetime) -> int:
    """Return the number of entries of a token since a time."""
    query = select(func.count()).select_from(ApiRequest)
    mine = (ApiRequest.project == token.project, ApiRequest.token_id == token.id)
    return session.scalar(query.where(*mine, ApiRequest.created_at > since)) or 0


def audit_entries(
    session: Session, project: str, *, limit: int, before: datetime | None = None
) -> list[AuditEntry]:
    """Return a project's entries of the audit, newest first. before: older than this time."""
    query = select(*_ENTRY).where(ApiRequest.project == project)
    if before is not None:
        query = query.where(ApiRequest.created_at < before)
    query = query.order_by(ApiRequest.created_at.desc(), ApiRequest.id.desc()).limit(limit)
    return [AuditEntry(**row) for row in session.execute(query).mappings()]


def _valid(at: datetime) -> tuple[Any, ...]:
    is_young = or_(ApiToken.expires_at.is_(None), ApiToken.expires_at > at)
    return is_young, ApiToken.revoked_at.is_(None)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()

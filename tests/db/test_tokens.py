"""Tokens of the ingest API, and the audit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select

from flexq_bench.db import tokens
from flexq_bench.db.errors import NotFoundError
from flexq_bench.db.tables import ApiToken

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)


def a_token(session, rights="write", expires_at=None, project="acme"):
    return tokens.create_token(session, project, "ci", rights, at=NOW, expires_at=expires_at)


def test_secret_is_stored_only_as_its_hash(session):
    token, secret = a_token(session)

    assert tokens.token_of(session, secret, NOW) == token
    assert secret not in str(session.execute(select(ApiToken.__table__)).all())
    assert tokens.token_of(session, f"{secret}x", NOW) is None


def test_each_right_includes_those_before_it(session):
    token, _ = a_token(session, "write")

    assert [token.may(right) for right in tokens.RIGHTS] == [True, True, False]


def test_expired_and_revoked_tokens_are_none(session):
    _, expiring = a_token(session, expires_at=NOW + DAY)
    token, revoked = a_token(session)

    tokens.revoke_token(session, "acme", token.id, at=NOW)

    assert tokens.token_of(session, expiring, NOW) is not None
    assert tokens.token_of(session, expiring, NOW + DAY) is None
    assert tokens.token_of(session, revoked, NOW) is None


def test_rotated_token_is_valid_until_the_grace_ends(session):
    token, old = a_token(session, expires_at=NOW + 30 * DAY)
    later = NOW + 10 * DAY

    new, secret = tokens.rotate_token(session, "acme", token.id, at=later, grace=DAY)

    assert tokens.token_of(session, old, later) is not None
    assert tokens.token_of(session, old, later + DAY) is None
    assert tokens.token_of(session, secret, later + 29 * DAY) == new
    assert (new.name, new.rights, new.expires_at) == ("ci", "write", later + 30 * DAY)


def test_tokens_of_another_project_are_not_found(session):
    token, _ = a_token(session, project="theirs")

    with pytest.raises(NotFoundError):
        tokens.revoke_token(session, "acme", token.id, at=NOW)
    with pytest.raises(NotFoundError):
        tokens.rotate_token(session, "acme", token.id, at=NOW, grace=DAY)


def entry(**changes):
    values = {"project": "acme", "action": "import", "status": 200, "created_at": NOW}
    return tokens.AuditEntry(**(values | {"answer": {"added": 1}} | changes))


def test_idempotency_key_belongs_to_one_request_of_a_project(session):
    tokens.add_entry(session, entry(idempotency_key="k"))
    tokens.add_entry(session, entry(idempotency_key="k", project="theirs"))
    tokens.add_entry(session, entry(status=422))
    tokens.add_entry(session, entry(status=422))

    assert tokens.entry_of_key(session, "acme", "k") == entry(idempotency_key="k")
    again = entry(idempotency_key="k", answer={"added": 0})
    assert tokens.add_entry(session, again) == entry(idempotency_key="k")


def test_audit_has_the_newest_first_and_ends(session):
    for days in (0, 1, 2):
        tokens.add_entry(session, entry(created_at=NOW + days * DAY))

    newest = tokens.audit_entries(session, "acme", limit=2)
    older = tokens.audit_entries(session, "acme", limit=2, before=newest[-1].created_at)
    tokens.add_entry(session, entry(created_at=NOW + (tokens.AUDIT_DAYS + 1.5) * DAY))

    assert [one.created_at for one in newest] == [NOW + 2 * DAY, NOW + DAY]
    assert [one.created_at for one in older] == [NOW]
    assert len(tokens.audit_entries(session, "acme", limit=9)) == 2

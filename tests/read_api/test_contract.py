"""Requests drawn from the published document, valid and not: responses match it."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pytest
from jsonschema import Draft202012Validator
from made_results import a_run

from flexq_bench.db.engine import open_database
from flexq_bench.db.tokens import create_token
from flexq_bench.read_api.app import api_app
from flexq_bench.read_api.endpoints import document
from flexq_bench.read_api.ingest import Ingest, Limits

SEED = 59
REQUESTS = 60  # for each address
HOSTILE = (
    *("", " ", "*", "%", "'; DROP TABLE run;--", "\0", "\x7f", "😀", "é" * 201, "[a", "**?"),
    *("-1", "0", "1e9", "99999999999999999999", "٣", "NaN", "true", "null", "{}", "../.."),
    *("2026-13-01", "0001-01-01T00:00:00+23:59", "9999-12-31", "9999-12-31T23:59:59-23:59"),
)
STORED = ("flexq-w6a6", "flexq*", "gemm", "time", "2025-11-21", a_run().uuid, "1", "open", "main")


def value_of(draw, schema):
    """A text for a parameter: stored, hostile, or of its schema."""
    if schema["type"] == "array":
        schema = schema["items"]
    kind = draw.random()
    if kind < 0.3:
        return draw.choice(HOSTILE)
    if kind < 0.6:
        return draw.choice(STORED)
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if schema["type"] == "integer":
        return str(draw.choice((schema["minimum"], schema["maximum"], 1, 7, 50)))
    letters = [chr(code) for code in (*range(32, 127), 0xE9, 0x4E2D)]
    return "".join(draw.choices(letters, k=draw.randint(1, 9)))


def requests_of(draw, path, operation):
    parameters = operation["parameters"]
    target = path
    for parameter in (p for p in parameters if p["in"] == "path"):
        given = value_of(draw, parameter["schema"])
        text = draw.choice(("1", a_run().uuid, a_run().uuid[:7], given))
        target = target.replace(f"{{{parameter['name']}}}", quote(text, safe="") or "x")
    in_query = [p for p in parameters if p["in"] == "query"]
    chosen = draw.sample(in_query, draw.randint(0, min(4, len(in_query))))
    pairs = [
        (p["name"], value_of(draw, p["schema"]))
        for p in chosen
        for _ in range(draw.choice((1, 1, 2)))
    ]
    if draw.random() < 0.05:
        pairs.append((draw.choice(("colour", "limit[]", "")), "1"))
    return target + ("?" + "&".join(f"{quote(n)}={quote(v)}" for n, v in pairs) if pairs else "")


@pytest.mark.parametrize("address", document()["paths"])
def test_responses_to_drawn_requests_match_the_document(slower, ask, address):
    draw = random.Random(f"{SEED} {address}")
    spec = document()
    operation = spec["paths"][address]["get"]
    statuses = set()
    for _ in range(REQUESTS):
        target = requests_of(draw, address, operation)
        answer = ask(target)
        statuses.add(answer.status)
        described = operation["responses"].get(str(answer.status))
        assert described, (target, answer.status, answer.body[:200])
        ((media_type, content),) = described["content"].items()
        assert answer.headers["content-type"] == media_type, target
        body = json.loads(answer.body) if media_type.endswith("json") else answer.body.decode()
        schema = {"components": spec["components"], **content["schema"]}
        Draft202012Validator(schema).validate(body)

    assert statuses <= {200, 404, 422}
    assert 200 in statuses


def fuzz(app, examples, headers=None):
    """Send requests that schemathesis draws from the document, and check the responses."""
    schemathesis = pytest.importorskip("schemathesis", reason="not installed")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [result.ok() for result in schema.get_all_operations()]

    @given(st.one_of([operation.as_strategy() for operation in operations]))
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case):
        # No schema says which bytes are a file of a format.
        is_upload = case.operation.definition.raw.get("operationId") == "postResults"
        case.call_and_validate(
            headers=headers, excluded_checks=[positive_data_acceptance] if is_upload else None
        )

    check()


@pytest.mark.slow
def test_schemathesis_finds_no_violation(slower):
    with open_database(str(slower), read_only=True) as database:
        fuzz(api_app(database), 300)


@pytest.mark.slow
@pytest.mark.parametrize("rights", ["admin", "write", None])
def test_schemathesis_finds_no_violation_in_the_ingest_api(tmp_path, rights):
    with open_database(str(tmp_path / "db.sqlite")) as database:
        ingest = Ingest(database, lambda series: {}, Limits(per_minute=100_000))
        app = api_app(database, further=ingest.routes(), described=ingest.described())
        headers = {}
        if rights is not None:
            now = datetime.now(UTC)
            with database.session() as session:
                bearer = session, "acme", "fuzzer", rights
                _, secret = create_token(*bearer, at=now, expires_at=now + timedelta(days=1))
            headers = {"Authorization": f"Bearer {secret}"}
        fuzz(app, 200, headers)


def test_document_describes_every_route_of_the_ingest_api(tmp_path):
    with open_database(str(tmp_path / "db.sqlite")) as database:
        ingest = Ingest(database, lambda series: {})
        described = ingest.described()

        assert {route.path for route in ingest.routes()} == set(described)
        assert set(described["/v1/tokens"]) == {"get", "post"}
        names = {one["name"] for one in described["/v1/results"]["post"]["parameters"]}
        assert {"project", "format", "commit", "Idempotency-Key"} <= names

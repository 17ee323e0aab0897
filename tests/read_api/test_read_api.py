"""The read API as its readers meet it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from made_results import H200, a_record, a_run

from flexq_bench.db import queries
from flexq_bench.db.engine import Database, open_database
from flexq_bench.db.errors import DatabaseError, NotFoundError, UnreachableError
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.store import add_record
from flexq_bench.read_api import app
from flexq_bench.read_api.badge import badge_svg
from flexq_bench.read_api.endpoints import ENDPOINTS, document
from flexq_bench.read_api.responses import Source
from flexq_bench.repository.git import GitError
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night

ADDRESSES = [
    "/v1/status",
    "/v1/series",
    "/v1/series/1",
    "/v1/alerts?state=all",
    "/v1/alerts/1",
    "/v1/runs",
    f"/v1/runs/{a_run().uuid[:8]}",
    f"/v1/runs/{a_run().uuid[:8]}/results",
    "/v1/nights",
    "/v1/results/latest",
    "/badge.json",
    "/badge.svg",
    "/healthz",
]


def raises(error):
    def fail(*_):
        raise error

    return fail


def plain(answer):
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/json"
    return json.loads(answer.body)


def image(answer):
    assert answer.headers["content-type"] == "image/svg+xml", answer.body
    return ET.fromstring(answer.body)


def test_the_document_is_valid_openapi():
    validator = pytest.importorskip("openapi_spec_validator", reason="not installed")

    validator.validate(document())


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_response_matches_the_document(slower, ask, address):
    path = address.partition("?")[0]
    (template,) = [
        endpoint.path
        for endpoint in ENDPOINTS
        if re.fullmatch(re.sub(r"\{.*?\}", r"[^/]+", endpoint.path), path)
        and endpoint.path.count("{") == (path not in [e.path for e in ENDPOINTS])
    ]
    spec = document()
    ((media_type, schema),) = spec["paths"][template]["get"]["responses"]["200"]["content"].items()

    given = ask(address)
    assert given.headers["content-type"] == media_type
    answer = json.loads(given.body) if media_type == "application/json" else given.body.decode()

    whole = {"components": spec["components"], **schema["schema"]}
    Draft202012Validator(whole).validate(answer)


def test_every_documented_address_is_tested():
    tested = {
        re.sub(r"/[0-9a-f]{8}|/1\b", "/*", address.partition("?")[0]) for address in ADDRESSES
    }

    assert tested == {re.sub(r"\{.*?\}", "*", endpoint.path) for endpoint in ENDPOINTS}


def test_latest_results_equal_the_query(path, ask):
    with open_database(str(path)) as database, database.session() as session:
        stored = {r.uuid: r.median_us for r in queries.latest_results(session)}

    answer = plain(ask("/v1/results/latest?kernel=flexq-w6a6&m=8"))

    assert answer["total"] == 2
    assert {r["uuid"]: r["median_us"] for r in answer["results"]}.items() <= stored.items()
    assert {(r["kernel"], r["m"]) for r in answer["results"]} == {("flexq-w6a6", 8)}
    assert all(r["value"] == r["median_us"] for r in answer["results"])


def test_pages_add_up_to_the_list(path, ask):
    everything = plain(ask("/v1/series"))
    first, second = (plain(ask(f"/v1/series?limit=4&offset={at}"))["series"] for at in (0, 4))

    assert everything["total"] == 8
    assert [*first, *second] == everything["series"]


def test_alert_has_its_kernels_and_verdicts(slower, ask):
    answer = plain(ask("/v1/alerts"))

    (alert,) = answer["alerts"]
    assert alert["kernels"] == ["flexq-w6a6"]
    detail = plain(ask(f"/v1/alerts/{alert['id']}"))
    assert [decision["verdict"] for decision in detail["decisions"]] == ["slower"]


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/v1/series/999", 404),
        ("/v1/runs/ffffffff", 404),
        ("/nothing", 404),
        ("/v1/series?limit=0", 422),
        ("/v1/series?limit=1e9", 422),
        ("/v1/series?colour=red", 422),
        ("/v1/alerts?state=lost", 422),
        ("/v1/results/latest?m=1%3B--", 422),
        ("/badge.svg?of=no-such-branch", 404),
        ("/badge.svg?project=nobody", 404),
        ("/badge.svg?style=neon", 422),
        ("/v1/series?limit=1&limit=2", 422),
        ("/v1/series?kernel=a%00b", 422),
        ("/v1/runs?since=yesterday", 422),
        ("/v1/runs?after=ffffffff", 404),
        ("/badge.svg?of=--upload-pack%3Dx", 404),
    ],
)
def test_invalid_request_has_one_line_error(path, ask, address, status):
    answer = ask(address)

    assert answer.status == status
    assert answer.headers["content-type"] == "application/problem+json"
    given = json.loads(answer.body)
    assert given["status"] == status
    assert given["title"]
    assert given["detail"] == given["error"] != ""
    assert "\n" not in given["detail"]
    assert "Traceback" not in given["detail"]


def test_unchanged_response_is_not_sent_again(path, ask):
    first = ask("/v1/series")

    again = ask("/v1/series", if_none_match=first.headers["etag"])
    other = ask("/v1/series?limit=1", if_none_match=first.headers["etag"])

    assert (again.status, again.body) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    assert other.status == 200


@pytest.fixture
def computed(monkeypatch):
    """The bodies that were computed, where each answer is looked after whenever it is asked for."""
    bodies, guarded = [], app._guarded

    def counted(answer, media_type):
        made = guarded(answer, media_type)
        bodies.append(made[1])
        return made

    monkeypatch.setattr(app, "_guarded", counted)
    monkeypatch.setattr(app, "CACHE_S", 0.0)
    return bodies


def test_response_is_cached_until_a_write(path, ask, computed):
    first, again = ask("/v1/runs"), ask("/v1/runs")
    assert (again.body, again.headers, len(computed)) == (first.body, first.headers, 1)

    with open_database(str(path)) as database, database.session() as session:
        add_record(session, a_record(a_run("another"), median_us=80.0))
    newer = ask("/v1/runs", if_none_match=first.headers["etag"])

    assert (newer.status, len(computed)) == (200, 2)
    assert newer.body != first.body
    assert ask("/v1/runs", if_none_match=newer.headers["etag"]).status == 304


@pytest.mark.parametrize("version", [lambda _: None, raises(DatabaseError("it is locked"))])
def test_response_without_database_version_is_computed_again(
    computed, monkeypatch, request, version
):
    """Of a server, which has none, and of a file that can't be read at the moment."""
    monkeypatch.setattr(Database, "version", version)
    ask = request.getfixturevalue("ask")
    statuses = [ask("/v1/status").status for _ in range(2)]

    assert (statuses, len(computed)) == ([200, 200], 2)


def test_cache_size_is_bounded(ask, computed, monkeypatch):
    size = len(ask("/v1/runs").body)
    monkeypatch.setattr(app, "_MAX_CACHED_BYTES", size + 1)
    ask("/v1/runs?limit=9")
    assert ask("/v1/runs").status == 200

    assert len(computed) == 3


def test_question_mark_in_a_path_is_not_a_query(ask):
    """/v1/runs%3Flimit=1? and /v1/runs?limit=1? are two addresses."""
    asked = ask("/v1/runs?limit=1?")
    path = ask("/v1/runs%3Flimit=1?")

    assert (asked.status, path.status) == (422, 404)


@pytest.mark.parametrize(
    ("method", "address"),
    [
        ("POST", "/v1/alerts/1"),
        ("PUT", "/v1/runs"),
        ("PATCH", "/v1/runs"),
        ("DELETE", "/badge.svg"),
        ("TRACE", "/openapi.json"),
    ],
)
def test_other_methods_are_refused(path, ask, method, address):
    before = hashlib.sha256(path.read_bytes()).hexdigest()

    answer = ask(address, method=method)

    assert answer.status == 405
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before


def test_badge_shows_the_worst_verdict_of_the_newest_commit(slower, ask):
    answer = ask("/badge.svg")

    assert answer.headers["content-type"].startswith("image/svg+xml")
    image = ET.fromstring(answer.body)
    assert image.get("aria-label") == "kernels: 1 slower"


def test_badge_and_latest_results_exclude_other_projects(slower, ask, compared, commits):
    before = plain(ask("/v1/results/latest"))
    theirs = {
        sha: replace(commit, sha="f" + sha[1:], topo_order=900 + index, project="acme")
        for index, (sha, commit) in enumerate(commits.items())
    }
    on = Machine("cuda", DeviceInfo("GPU-1", H200, "cuda"), project="acme")
    record = a_record(
        a_run("theirs"), median_us=80.0, project="acme", commit=next(iter(theirs.values()))
    )
    judged = compared("flexq-w6a6", 0.9, base=3, head=6)
    judged = replace(judged, base="f" + judged.base[1:], head="f" + judged.head[1:])
    with open_database(str(slower)) as database, database.session() as session:
        add_record(session, record)
        record_night(
            session, [judged], on, {commit.sha: commit for commit in theirs.values()}, alerting=True
        )

    assert ET.fromstring(ask("/badge.svg").body).get("aria-label") == "kernels: 1 slower"
    theirs = ET.fromstring(ask("/badge.svg?project=acme").body)
    assert theirs.get("aria-label") == "kernels: faster"
    assert plain(ask("/v1/results/latest")) == before


def test_badge_of_unjudged_commit_says_not_judged(path, ask):
    assert "not judged" in ask("/badge.svg?of=abcdef1").body.decode()


def test_badge_finds_a_branch_in_the_repository(slower, tmp_path):
    tree = tmp_path / "tree"
    git = ("git", "-C", str(tree), "-c", "user.name=A", "-c", "user.email=a@example.com")
    subprocess.run(["git", "init", "-q", "-b", "topic", str(tree)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)

    with open_database(str(slower)) as database, database.session() as session:
        source = Source(session, tree)
        assert "not judged" in badge_svg(source, {"of": "topic"})
        for name in ("nowhere", "topi", "--all", "../tree"):
            with pytest.raises(
                NotFoundError, match=r"^(no branch and no commit|.* is no commit)"
            ) as no:
                badge_svg(source, {"of": name})
            # Neither what other branches there are, nor where they are.
            assert "topic" not in str(no.value).replace(name, "")
            assert str(tmp_path) not in str(no.value)


@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("postgresql://ada@db.internal:5432/flexq can't be reached"),
        GitError("git rev-parse does not run: /srv/ada/clone"),
    ],
)
def test_server_error_reveals_no_host_user_or_file(ask, monkeypatch, caplog, error):
    monkeypatch.setattr(Database, "session", raises(error))

    answer = ask("/v1/runs")

    assert answer.status == 503
    detail = "the database can't be read now: try again later"
    assert json.loads(answer.body)["detail"] == detail
    assert str(error) in caplog.text

"""Conventions of the API: filters, pages, compression, health, metrics and badges."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from made_results import a_record, a_run
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from flexq_bench.db.engine import open_database
from flexq_bench.db.nightly import NightInfo, set_night
from flexq_bench.db.store import add_record
from flexq_bench.read_api.app import api_app
from flexq_bench.read_api.badge import STYLES
from flexq_bench.read_api.browser_guard import DATA_POLICY, BrowserGuard
from flexq_bench.read_api.endpoints import ENDPOINTS

WIKI = "https://wiki.example.com"
LISTS = {
    "/v1/series": "series",
    "/v1/alerts?state=all": "alerts",
    "/v1/alerts/1": "decisions",
    "/v1/runs": "runs",
    f"/v1/runs/{a_run().uuid}/results": "results",
    "/v1/nights": "nights",
    "/v1/results/latest": "results",
}


def read(ask, address):
    answer = ask(address)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


@pytest.fixture
def several(slower):
    """Four more runs with nights, and the results of another project and of another tool."""
    with open_database(str(slower)) as database, database.session() as session:
        for number in range(4):
            at = (datetime(2026, 3, 1, tzinfo=UTC) + timedelta(days=number)).isoformat()
            run = replace(a_run(f"run {number}"), created_at=at)
            add_record(session, replace(a_record(run, median_us=80.0), created_at=at))
            for gpu in ("A", "B"):
                night = NightInfo(f"{number} {gpu}", at[:10], "nightly", gpu, run.uuid)
                set_night(session, night, "done", at=datetime(2026, 3, 9, tzinfo=UTC))
        theirs = a_record(a_run("theirs"), median_us=70.0, project="acme")
        add_record(session, theirs)
        device = replace(theirs.device, backend="outside")
        add_record(
            session,
            a_record(
                a_run("tool"), median_us=9.0, project="tool", backend="outside", metric="rate",
                unit="1/s", direction="higher", device=device,
            ),
        )  # fmt: skip
    return slower


def test_repeated_parameter_selects_any_of_its_values(path, ask):
    chosen = read(ask, "/v1/series?m=1&m=8")["series"]
    one = read(ask, "/v1/series?m=1")["series"]

    assert {series["m"] for series in chosen} == {1, 8}
    assert {series["m"] for series in one} == {1}


@pytest.mark.parametrize(
    ("query", "kernels"),
    [
        ("kernel=flexq*", {"flexq-w6a6"}),
        ("kernel=*w8a8&kernel=flexq-w6a6", {"flexq-w6a6", "cublaslt-w8a8"}),
        ("kernel=FLEXQ*", set()),
        ("kernel=flexq", set()),
        ("kernel=[f]lexq*", set()),
        ("kernel=flexq-w?a6&m=1", {"flexq-w6a6"}),
    ],
)
def test_globs_match_whole_texts(path, ask, query, kernels):
    for address in ("/v1/series", "/v1/results/latest"):
        rows = read(ask, f"{address}?{query}")
        (rows,) = (value for value in rows.values() if isinstance(value, list))
        assert {row["kernel"] for row in rows} == kernels


def test_time_ranges_are_inclusive_and_dates_are_days(several, ask):
    def days(query):
        return [run["created_at"][:10] for run in read(ask, f"/v1/runs?{query}")["runs"]]

    assert days("since=2026-03-02&until=2026-03-03") == ["2026-03-03", "2026-03-02"]
    assert days("since=2026-03-04T00:00:00Z") == ["2026-03-04"]
    assert days("since=2026-03-04T00:00:00.000001%2B00:00") == []


def test_latest_results_of_a_time_range_are_its_newest(several, ask):
    rows = read(ask, "/v1/results/latest?until=2026-03-02&since=2026-03-01")["results"]

    assert [row["created_at"][:10] for row in rows] == ["2026-03-02"]


def test_latest_results_of_other_projects_and_metrics(several, ask):
    def projects(query):
        rows = read(ask, f"/v1/results/latest?{query}")["results"]
        return {(row["project"], row["metric"], row["unit"]) for row in rows}

    assert projects("") == {("", "time", "us")}
    assert projects("project=tool") == {("tool", "rate", "1/s")}
    assert {project for project, *_ in projects("project=*")} == {"", "acme", "tool"}
    assert projects("project=*&metric=rate") == {("tool", "rate", "1/s")}


@pytest.mark.parametrize("address", LISTS)
@pytest.mark.parametrize("limit", [1, 3])
def test_pages_after_one_another_are_the_list(several, ask, address, limit):
    with_query = address + ("&" if "?" in address else "?")
    name = LISTS[address]
    whole = read(ask, f"{with_query}limit=100")
    assert whole[name]
    assert whole["next"] is None

    rows, after = [], ""
    while after is not None:
        page = read(ask, f"{with_query}limit={limit}{after and f'&after={after}'}")
        assert len(page[name]) <= limit
        rows += page[name]
        after = page["next"]

    assert rows == whole[name]
    if "total" in whole:
        assert whole["total"] == len(rows)


def test_counts_of_a_run_include_later_results(several, ask, monkeypatch):
    monkeypatch.setattr("flexq_bench.read_api.app.CACHE_S", 0.0)
    address = f"/v1/runs/{a_run('run 1').uuid}"
    before = read(ask, address)["run"]["statuses"]

    with open_database(str(several)) as database, database.session() as session:
        add_record(session, a_record(a_run("run 1"), median_us=3.0, m=8))

    assert read(ask, address)["run"]["statuses"] == {"ok": before["ok"] + 1}
    assert read(ask, f"{address}/results")["total"] == before["ok"] + 1


def test_response_is_compressed_for_those_who_accept_it(path, ask):
    plain = ask("/v1/series")
    packed = ask("/v1/series", accept_encoding="br, gzip")

    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) == len(packed.body) < len(plain.body)
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    known = packed.headers["etag"]
    assert ask("/v1/series", accept_encoding="gzip", if_none_match=known).status == 304
    assert "content-encoding" not in ask("/v1/series", accept_encoding="gzip;q=0").headers


@pytest.fixture
def client(path):
    """A client of the guarded application, as serve-api starts it for the wiki's pages."""
    with open_database(str(path), read_only=True) as database:
        app = BrowserGuard(api_app(database), ("localhost",), DATA_POLICY, (WIKI,))
        yield TestClient(app, base_url="http://localhost")


def test_preflight_of_a_named_origin_is_answered(client):
    asked = {"origin": WIKI, "access-control-request-method": "GET"}
    answer = client.options("/v1/series", headers=asked)

    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == WIKI
    assert "GET" in answer.headers["access-control-allow-methods"]
    assert "If-None-Match" in answer.headers["access-control-allow-headers"]
    asked["origin"] = "https://evil.example"
    assert client.options("/v1/series", headers=asked).status_code == 403


def test_docs_page_lists_every_address(client):
    answer = client.get("/docs")

    assert answer.headers["content-type"].startswith("text/html")
    assert all(f"GET {endpoint.path}" in answer.text for endpoint in ENDPOINTS)
    assert "<script" not in answer.text


def test_root_leads_to_the_docs_page(client):
    assert client.get("/", follow_redirects=False).headers["location"] == "docs"


def test_metrics_count_requests_by_path_and_status(client):
    client.get("/v1/series/1")
    client.get("/v1/series/999")
    client.get("/nowhere")
    client.get("/v1/series/1")

    families = {f.name: f for f in text_string_to_metric_families(client.get("/metrics").text)}

    counts = {
        (s.labels["path"], s.labels["status"]): s.value
        for s in families["flexq_api_requests"].samples
    }
    assert counts["/v1/series/{id}", "200"] == 2
    assert counts["/v1/series/{id}", "404"] == 1
    assert counts["other", "404"] == 1
    buckets = {
        (s.labels["path"], s.labels.get("le")): s.value
        for s in families["flexq_api_request_seconds"].samples
        if s.name.endswith("_bucket")
    }
    assert buckets["/v1/series/{id}", "+Inf"] == 3
    assert families["flexq_database_up"].samples[0].value == 1


@pytest.mark.parametrize("style", STYLES)
def test_badge_has_each_style(slower, ask, style):
    answer = ask(f"/badge.svg?style={style}")

    assert answer.headers["content-type"] == "image/svg+xml"
    assert (b'rx="0"' in answer.body) == (style == "flat-square")


def test_shields_badge_has_the_verdict(slower, ask):
    badge = read(ask, "/badge.json")

    assert badge == {
        "schemaVersion": 1,
        "label": "kernels",
        "message": "1 slower",
        "color": "#B3261E",
    }

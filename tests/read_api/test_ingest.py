"""The ingest API as bearers of tokens meet it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from made_results import records_of
from posting import Poster
from starlette.concurrency import run_in_threadpool

from flexq_bench.db import queries, tokens
from flexq_bench.db.engine import open_database
from flexq_bench.db.exchange import import_file, record_line
from flexq_bench.db.records import Record
from flexq_bench.exchange import ingest_client
from flexq_bench.read_api import ingest

SHA = "a" * 40
CSV = f"benchmark,value,commit\ngemm,21.4,{SHA}\n"
FILES = Path(__file__).parents[1] / "exchange/external/files"


@pytest.fixture
def poster(tmp_path):
    with open_database(str(tmp_path / "ingest.sqlite")) as database:
        yield Poster(database)


def values(database):
    with database.session() as session:
        records = queries.stored_records(session, Record, queries.Filters())
        return sorted((one.project, one.median_us) for one in records)


def test_posted_results_are_stored_and_judged(poster):
    _, secret = poster.token()

    answer = poster.post(CSV, secret, project="acme", format="csv")

    assert (answer.status, answer.content["added"]) == (200, 1)
    assert values(poster.database) == [("acme", 21.4)]
    assert poster.judged == [{1}]


@pytest.mark.parametrize("name", ["data.js", "go.txt", "vllm.json", "llama_bench.md"])
def test_posted_files_are_recognized(poster, name):
    _, secret = poster.token()

    answer = poster.post((FILES / name).read_text(), secret, commit=SHA)

    assert answer.status == 200, answer.body
    assert answer.content["added"] == len(values(poster.database)) > 0


def test_repeated_post_changes_nothing(poster):
    _, secret = poster.token()
    first = poster.post(CSV, secret, key="k1")

    same_key = poster.post(CSV, secret, key="k1")
    no_key = poster.post(CSV, secret)

    assert (same_key.content, same_key.headers["idempotency-replayed"]) == (first.content, "true")
    assert (no_key.content["added"], no_key.content["replaced"]) == (0, 0)
    assert len(values(poster.database)) == 1


def test_idempotency_key_of_another_content_is_refused(poster):
    _, secret = poster.token()
    poster.post(CSV, secret, key="k1")

    changed = poster.post(CSV.replace("21.4", "22"), secret, key="k1")
    elsewhere = poster.post(CSV, secret, key="k1", occasion="second")

    assert (changed.status, elsewhere.status) == (422, 422)
    assert values(poster.database) == [("acme", 21.4)]


def test_refused_request_leaves_its_key_free(poster):
    _, secret = poster.token()

    assert poster.post("hello", secret, key="k1").status == 422
    assert poster.post(CSV, secret, key="k1").status == 200


def test_token_of_another_project_is_forbidden(poster):
    _, secret = poster.token(project="theirs")

    answer = poster.post(CSV, secret, project="acme")

    assert answer.status == 403
    assert "not of project 'acme'" in answer.content["detail"]
    assert values(poster.database) == []


@pytest.mark.parametrize("rights", ["read", "write", "admin"])
def test_rights_permit_what_they_say(poster, rights):
    _, secret = poster.token(rights=rights)

    asked = [
        poster.post("", secret, path="/v1/requests", method="GET").status,
        poster.post(CSV, secret).status,
        poster.post("", secret, path="/v1/tokens", method="GET").status,
    ]

    n = {"read": 1, "write": 2, "admin": 3}[rights]
    assert asked == [200] * n + [403] * (3 - n)


@pytest.mark.parametrize("secret", [None, "", "fqb_wrong"])
def test_unknown_token_is_unauthorized(poster, secret):
    poster.token()

    answer = poster.post(CSV, secret)

    assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_expired_and_revoked_tokens_are_unauthorized(poster):
    _, expired = poster.token(days=-1)
    revoked, secret = poster.token()
    _, admin = poster.token(rights="admin")

    ended = poster.post("", admin, path=f"/v1/tokens/{revoked.id}", method="DELETE")

    assert ended.status == 200
    assert [poster.post(CSV, one).status for one in (expired, secret)] == [401, 401]


def test_admin_creates_and_rotates_tokens_of_its_project(poster):
    _, admin = poster.token(rights="admin")
    of_others, _ = poster.token(project="theirs")

    made = poster.post("", admin, path="/v1/tokens", name="nightly", rights="write").content
    path = f"/v1/tokens/{made['token']['id']}/rotate"
    rotated = poster.post("", admin, path=path, grace_hours=0).content
    foreign = poster.post("", admin, path=f"/v1/tokens/{of_others.id}/rotate")

    assert poster.post(CSV, made["secret"]).status == 401
    assert poster.post(CSV, rotated["secret"]).status == 200
    assert foreign.status == 404


def test_secret_is_neither_in_the_audit_nor_in_the_database(poster, tmp_path):
    _, admin = poster.token(rights="admin")
    made = poster.post("", admin, path="/v1/tokens", key="k", name="nightly").content
    again = poster.post("", admin, path="/v1/tokens", key="k", name="nightly").content

    audit = poster.post("", admin, path="/v1/requests", method="GET").body
    stored = b"".join(file.read_bytes() for file in tmp_path.glob("ingest.sqlite*"))

    assert again["secret"] != made["secret"]
    assert made["secret"].encode() not in audit + stored
    assert admin.encode() not in stored


def test_audit_has_every_request_with_its_answer(poster):
    token, secret = poster.token()
    poster.post(CSV, secret, key="k1")
    poster.post(CSV, secret, project="theirs")
    poster.post("hello", secret)

    entries = poster.post("", secret, path="/v1/requests", method="GET").content["requests"]

    assert [(e["status"], e["token_id"], e["client"]) for e in entries] == [
        (status, token.id, "192.0.2.7") for status in (422, 403, 200)
    ]
    assert entries[-1]["answer"]["added"] == 1


def test_limits_of_size_and_rate_are_kept(tmp_path):
    with open_database(str(tmp_path / "a.sqlite")) as database:
        small = Poster(database, max_bytes=len(CSV), per_minute=2)
        _, secret = small.token()
        _, other = small.token()

        statuses = [small.post(text, secret).status for text in (CSV + "\n", CSV, CSV)]

        assert statuses == [413, 200, 429]
        assert small.post(CSV, other).status == 200
        another = Poster(database, per_minute=2)  # a second server of this database
        assert [another.post(CSV, secret).status for _ in range(2)] == [200, 429]


def test_silent_senders_leave_room_for_others(poster, monkeypatch):
    monkeypatch.setattr(ingest, "_MAX_SILENCE_S", 0.05)
    _, secret = poster.token()
    headers = {"authorization": f"Bearer {secret}"}

    async def many():
        contents = [*[None] * 20, CSV]
        return await asyncio.gather(
            *(poster._post(one, headers, "/v1/results", "POST", {}) for one in contents)
        )

    statuses = [answer.status for answer in asyncio.run(many())]

    assert statuses == [*[408] * 20, 200]


def test_imports_that_wait_leave_threads_to_readers(poster, monkeypatch):
    _, secret = poster.token()
    read = threading.Event()
    monkeypatch.setattr(poster, "judged", Held(read))

    async def many():
        headers = {"authorization": f"Bearer {secret}"}
        posts = [
            asyncio.create_task(
                poster._post(CSV, headers, "/v1/results", "POST", {"occasion": number})
            )
            for number in range(45)
        ]
        while not read.is_set():
            await asyncio.wait_for(run_in_threadpool(poster.judged.begun.wait), 5)
            await asyncio.wait_for(run_in_threadpool(read.set), 5)
        return [answer.status for answer in await asyncio.gather(*posts)]

    assert asyncio.run(many()) == [200] * 45


class Held(list):
    """Results that are judged only after somebody has read."""

    def __init__(self, read):
        super().__init__()
        self.begun, self._read = threading.Event(), read

    def append(self, judged):
        self.begun.set()
        assert self._read.wait(20)
        super().append(judged)


def test_gzip_content_is_stored_as_what_it_packs(poster):
    _, secret = poster.token()
    plain = poster.post(CSV, secret, key="plain")

    packed = poster.post(gzip.compress(CSV.encode()), secret, key="packed", coding="gzip")

    assert plain.content["added"] == packed.content["read"] == 1
    assert packed.content["added"] == packed.content["replaced"] == 0


@pytest.mark.parametrize(
    ("content", "coding", "status"),
    [
        (gzip.compress(bytes(10_000)), "gzip", 413),  # more than the limit, unpacked
        (gzip.compress(CSV.encode())[:-9], "gzip", 400),
        (CSV, "br", 415),
    ],
)
def test_bad_coding_of_a_content_stores_nothing(tmp_path, content, coding, status):
    with open_database(str(tmp_path / "a.sqlite")) as database:
        small = Poster(database, max_bytes=5_000)
        _, secret = small.token()

        assert small.post(content, secret, coding=coding).status == status
        assert not small.judged


@pytest.mark.parametrize(
    ("content", "parameters", "says"),
    [
        ("hello", {}, "the content is of no known format"),
        (CSV, {"format": "svg"}, "format is 'svg'"),
        ("benchmark,value\n", {"format": "csv"}, "it has no results"),
        (CSV, {"time": "soon"}, "time is 'soon'"),
        (CSV, {"commit": "; rm"}, "commit is '; rm'"),
        (CSV, {"device": "a\nb"}, "device has a control character"),
        ("{}", {"format": "records"}, "the content:1: "),
    ],
)
def test_invalid_request_names_no_file_of_the_server(poster, content, parameters, says):
    _, secret = poster.token()

    answer = poster.post(content, secret, **parameters)

    assert answer.status == 422
    assert says in answer.content["detail"]
    assert "/tmp" not in answer.content["detail"]


def test_refused_results_are_named_and_others_stored(poster):
    _, secret = poster.token()

    answer = poster.post(CSV + f"bad,-1,{SHA}\n", secret).content

    assert (answer["added"], answer["refused"]) == (1, 1)
    assert answer["refusals"] == ["row 3: -1 µs is not a plausible time"]


def test_sidecar_files_of_the_server_are_not_read(poster, tmp_path):
    """nvbench names a file of samples, which a request must not choose."""
    name = f"../../../../../../{tmp_path}/times.bin"
    (tmp_path / "times.bin").write_bytes(b"\0\0\x80\x3f" * 3)

    def summary(tag, **data):
        return {"tag": tag, "data": [{"name": k, "value": v} for k, v in data.items()]}

    state = {
        "name": "s",
        "device": 0,
        "axis_values": None,
        "summaries": [
            summary("nv/cold/time/gpu/mean", value="2e-5"),
            summary("nv/json/bin:nv/cold/sample_times", filename=name, size="3"),
        ],
    }
    content = {
        "devices": [{"id": 0, "name": "H200"}],
        "benchmarks": [{"name": "gemm", "states": [state]}],
    }
    _, secret = poster.token()

    poster.post(json.dumps(content), secret, commit=SHA)

    assert values(poster.database) == [("acme", 20.0)]


# Records


def lines(records):
    return "\n".join(map(record_line, records)) + "\n"


def test_records_of_this_repository_need_its_token(poster):
    _, own = poster.token(project="")
    _, other = poster.token(project="acme")
    records = records_of()

    refused = poster.post(lines(records), other, format="records")
    stored = poster.post(lines(records), own, format="records", project="flexq-bench")

    assert refused.status == 403
    assert (stored.status, stored.content["added"]) == (200, len(records))


def test_records_in_a_run_of_another_project_are_forbidden(poster, tmp_path):
    from dataclasses import replace

    _, other = poster.token(project="acme")
    mine = records_of()[:1]
    (tmp_path / "own.jsonl").write_text(lines(mine))
    with poster.database.session() as session:
        import_file(session, tmp_path / "own.jsonl")
    theirs = [replace(one, project="acme", uuid=one.uuid[::-1]) for one in mine]

    answer = poster.post(lines(theirs), other, format="records")

    assert answer.status == 403
    assert len(values(poster.database)) == 1


# A server of its own process


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture
def serve(tmp_path):
    """serve(): starts the server on one port and database, after a kill again; its process."""
    port, started = free_port(), []
    path = tmp_path / "served.sqlite"
    with open_database(str(path)):
        pass

    def start():
        command = [sys.executable, "-m", "flexq_bench", "serve-api", "--ingest"]
        command += ["--port", str(port), "--db", str(path)]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return started[-1]
            time.sleep(0.1)
        raise TimeoutError

    start.url, start.path = f"http://127.0.0.1:{port}", path
    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_server_ends_beside_a_silent_sender(serve):
    process = serve()
    with open_database(str(serve.path)) as database:
        _, secret = Poster(database).token()
    with socket.create_connection(("127.0.0.1", int(serve.url.rpartition(":")[2]))) as sender:
        lines = ("POST /v1/results HTTP/1.1", "Host: localhost", "Content-Length: 9")
        sender.sendall("\r\n".join((*lines, f"Authorization: Bearer {secret}", "", "x")).encode())
        time.sleep(1)
        process.terminate()

        assert process.wait(25) in (0, -signal.SIGTERM)


@pytest.mark.slow
def test_kill_of_the_server_loses_no_acknowledged_result(serve):
    process = serve()
    with open_database(str(serve.path)) as database:
        _, secret = Poster(database).token()
        acknowledged = []
        for number in range(12):
            content = f"benchmark,value\ngemm,{20 + number}\n".encode()
            of = {"project": "acme", "format": "csv", "commit": f"{number:040x}"}
            if number % 3 == 2:  # while a request is on its way
                pending = subprocess.Popen(
                    [sys.executable, "-c", f"""
import sys
from flexq_bench.exchange.ingest_client import send
send({serve.url!r}, {secret!r}, {content!r}, attempts=1, **{of!r})
"""],
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                time.sleep(0.05 * number)
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                acknowledged += [20.0 + number] if pending.wait() == 0 else []
                process = serve()
            assert ingest_client.send(serve.url, secret, content, **of)["refused"] == 0
            acknowledged.append(20.0 + number)
            assert {value for _, value in values(database)} >= set(acknowledged)
        stored = [value for _, value in values(database)]

    assert stored == sorted(20.0 + number for number in range(12))


@pytest.mark.slow
def test_client_records_results_without_access_to_the_database(serve, tmp_path):
    serve()
    with open_database(str(serve.path)) as database:
        _, secret = Poster(database).token(project="")
    (tmp_path / "night.jsonl").write_text(lines(records_of()))
    command = [sys.executable, "-m", "flexq_bench.exchange.ingest_client", "night.jsonl"]
    command += ["--url", serve.url, "--project", "flexq-bench", "--format", "records"]

    def sent(token):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("FLEXQ_BENCH")}
        ran = subprocess.run(
            command, cwd=tmp_path, env=clean | {"FLEXQ_BENCH_TOKEN": token}, capture_output=True
        )
        return ran.returncode

    assert [sent("fqb_wrong"), sent(secret), sent(secret)] == [5, 0, 0]
    with open_database(str(serve.path), read_only=True) as database:
        assert len(values(database)) == len(records_of())
        with database.session() as session:
            assert len(tokens.audit_entries(session, "", limit=9)) == 1

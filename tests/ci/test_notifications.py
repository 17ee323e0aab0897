"""Notifications: events, subscriptions, delivery and retries."""

from __future__ import annotations

import json
import logging
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from sqlalchemy import select

from flexq_bench.ci.late_night import check_late_night
from flexq_bench.ci.notifications import channels, events
from flexq_bench.ci.notifications.channels import DELIVERY
from flexq_bench.ci.notifications.delivery import (
    CLAIM_DURATION,
    MAX_RETRY_DELAY,
    deliver,
    retry_after,
)
from flexq_bench.ci.notifications.subscriptions import load_subscriptions
from flexq_bench.ci.report_data import KindReport
from flexq_bench.db.outbox import (
    EventInfo,
    add_event,
    address,
    claim,
    events_to_address,
)
from flexq_bench.db.records import CommitInfo, DeviceInfo, GateLimit, GateRecord
from flexq_bench.db.tables import Delivery
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.nightly import record_night
from flexq_bench.workloads.errors import WorkloadError

pytest.importorskip("requests")

SECRET = "the key of the hook"
NOW = datetime(2026, 1, 15, 3, tzinfo=UTC)
MACHINE = Machine("cpu", DeviceInfo("CPU-1", "A CPU", "cpu"))

_RECEIVER = Path(__file__).parents[2] / "docs/external-results.md"
_docs: dict = {}
exec(_RECEIVER.read_text().split("```python\n")[1].split("```")[0], _docs)
is_genuine = _docs["is_genuine"]


class Receiver:
    """A webhook on this machine that keeps what it takes. answers: status codes, the last stays."""

    def __init__(self):
        self.taken, self.headers, self.answers = [], [], [200]
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answers = receiver.answers
                status = answers.pop(0) if len(answers) > 1 else answers[0]
                if status == 200:
                    receiver.taken.append((body, dict(self.headers)))
                self.send_response(status)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=in-the-url"

    @property
    def messages(self):
        return [json.loads(body) for body, _ in self.taken]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver(monkeypatch):
    made = Receiver()
    monkeypatch.setenv("HOOK_URL", made.url)
    monkeypatch.setenv("HOOK_KEY", SECRET)
    yield made
    made.close()


@pytest.fixture
def subscribe(tmp_path):
    def write(text=""):
        path = tmp_path / "subscriptions.toml"
        head = 'version = 1\npolicy = "default"\n'
        hook = '[[subscription]]\nname = "hook"\nurl_env = "HOOK_URL"\nsecret_env = "HOOK_KEY"\n'
        path.write_text(head + hook + text)
        return load_subscriptions(path)

    return write


@pytest.fixture
def conclude(database, commits):
    """conclude(comparison, …): what a night stores of them, with its events, as ci.nightly does."""

    def run(*comparisons):
        with database.session() as session:
            night = record_night(session, comparisons, MACHINE, commits, alerting=True, at=NOW)
            events.add_alert_events(session, night.opened, at=NOW)
            events.add_improvement_events(session, night.judged, "A CPU", at=NOW)
        return night

    return run


def an_event(key="one", **changes):
    given = {
        "kind": "alert",
        "severity": "warning",
        "subject": "s",
        "body": "b",
        "created_at": NOW,
        "kernels": ("flexq-w6a6",),
        "gpus": ("NVIDIA H200",),
    }
    return EventInfo(key=key, **given | changes)


def sending(database, subscriptions, at=NOW):
    return deliver(database, subscriptions, now=lambda: at)


def test_alert_is_one_signed_message(database, receiver, subscribe, conclude, compared):
    slower = compared("flexq-w6a6", 1.05)
    conclude(slower)
    conclude(slower)
    for _ in range(3):
        sending(database, subscribe())

    (message,) = receiver.messages
    ((body, headers),) = receiver.taken
    assert is_genuine(SECRET, headers, body)
    assert headers[DELIVERY] == message["delivery"]
    assert (message["kind"], message["severity"]) == ("alert", "warning")
    assert message["kernels"] == ["flexq-w6a6"]
    assert "flexq +5" in message["subject"]


@pytest.mark.parametrize("changed", ["webhook-id", "webhook-timestamp", "body", "key"])
def test_receiver_of_the_docs_refuses_a_changed_message(database, receiver, subscribe, changed):
    with database.session() as session:
        add_event(session, an_event())
    sending(database, subscribe())
    ((body, headers),) = receiver.taken
    message = {**headers, "body": body, "key": SECRET}
    now = headers["webhook-timestamp"]
    message[changed] = str(int(now) + 1) if message[changed] == now else message[changed] * 2

    assert is_genuine(SECRET, headers, body)
    assert not is_genuine(message["key"], message, message["body"])
    assert not is_genuine(SECRET, headers, body, max_age_s=-1)


def test_url_may_have_upper_case_scheme_and_spaces(database, receiver, subscribe, monkeypatch):
    monkeypatch.setenv("HOOK_URL", f" {receiver.url.replace('http', 'HTTP', 1)}\n")
    with database.session() as session:
        add_event(session, an_event())

    assert sending(database, subscribe()).sent == 1


def test_canaries_and_machine_changes_are_not_notified(
    database, receiver, subscribe, conclude, compared
):
    canary = compared("flexq-w6a6", 1.05, base=1, head=1)
    same_code = [compared("flexq-w6a8", ratio, same_binary=True) for ratio in (1.05, 0.95)]
    conclude(canary, compared("abq-w4a4", 0.95, base=1, head=1), *same_code)
    sending(database, subscribe())

    assert receiver.messages == []


def test_improvement_is_an_info_event(database, receiver, subscribe, conclude, compared):
    conclude(compared("flexq-w6a6", 0.9), compared("read-6", 1.0), compared("cublaslt-w8a8", 1.0))
    sending(database, subscribe())

    (message,) = receiver.messages
    assert (message["kind"], message["severity"]) == ("improvement", "info")


def test_wrong_results_and_large_slowdowns_are_critical(
    database, receiver, subscribe, conclude, compared
):
    conclude(compared("flexq-w6a6", 1.3), compared("abq-w4a4", 1.0, correct=False))
    sending(database, subscribe())

    assert {message["severity"] for message in receiver.messages} == {"critical"}
    assert len(receiver.messages) == 2


def a_report(gpu="A CPU", **changes):
    given = dict.fromkeys(("opened", "fixed", "notes", "worse"), ())
    given |= dict.fromkeys(("candidates", "canaries", "change_points"), 0)
    given |= {"reasons": {}, "verdicts": {}}
    given |= {"planned": 3, "received": 3, "statuses": {"ok": 3}, "run": "r", "commit": "c" * 40}
    return KindReport(**given | {"night": "2026-01-15", "suite": "nightly", "gpu": gpu} | changes)


def test_night_has_one_digest_for_all_gpus(database, receiver, subscribe):
    reports = [a_report(), a_report("NVIDIA H200", opened=(4,))]
    for _ in range(2):  # resumed
        with database.session() as session:
            events.add_digest_event(session, "2026-01-15", "nightly", reports, at=NOW)
        sending(database, subscribe())

    (message,) = receiver.messages
    assert message["kind"] == "digest"
    assert "1 alerts opened" in message["subject"]
    assert "NVIDIA H200" in message["text"]


def test_first_wrong_result_of_a_night_is_notified(build, database, receiver, subscribe):
    wrong = build.a_record(status="incorrect", detail="off by 3")
    with database.session() as session:
        for record in (wrong, replace(wrong, case="another"), replace(wrong, gpu="B")):
            events.add_wrong_result_event(session, "2026-01-15", "nightly", record, at=NOW)
    sending(database, subscribe())

    first, other_gpu = receiver.messages
    assert first["text"].startswith(f"{wrong.case}: off by 3")
    assert (first["severity"], other_gpu["severity"]) == ("critical", "critical")


def test_missing_results_of_a_night_are_notified(database, receiver, subscribe):
    with database.session() as session:
        events.add_nightly_event(session, a_report(), at=NOW)
        events.add_nightly_event(
            session, a_report("B", received=1, reasons={"no B was there": 2}), at=NOW
        )
        events.add_nightly_event(session, a_report("C", statuses={"ok": 2, "incorrect": 1}), at=NOW)
    sending(database, subscribe())

    message, wrong = receiver.messages
    assert message["subject"].endswith("on B: 2 of 3 planned results are missing")
    assert message["text"] == "2 × no B was there"
    assert wrong["subject"].endswith("on C: 1 cases are wrong")
    assert (message["severity"], wrong["severity"]) == ("warning", "critical")


def test_only_failing_gates_are_notified(database, receiver, subscribe, gate, compared):
    gate(compared("flexq-w6a6", 1.0))
    sending(database, subscribe())
    assert receiver.messages == []

    gate(compared("flexq-w6a6", 1.2))
    sending(database, subscribe(), at=datetime.now(UTC))

    (message,) = receiver.messages
    assert (message["kind"], message["severity"]) == ("gate", "critical")


def test_ambiguous_accuracy_gate_is_a_warning(database):
    verdicts = {"pass": 0, "regression": 1, "ambiguous": 3, "missing": 4}
    limit = GateLimit(
        "KL mean of wikitext", "0.02 nats", "ambiguous", "may be 0.03", *[None] * 5, "nats"
    )
    records = [
        GateRecord(
            uuid=verdict, model="tiny", model_hash="ab" * 32, scheme="w6a6", base="fp16",
            policy="default", policy_version=1, policy_hash="cd" * 32, verdict=verdict,
            exit_code=code, limits=(limit,), created_at=NOW.isoformat(), content_hash=None,
            through="reference", run=new_run("accuracy", "gate", ()),
            commit=CommitInfo("c" * 40, None, 1, False), device=MACHINE.device, environment={},
        )
        for verdict, code in verdicts.items()
    ]  # fmt: skip
    with database.session() as session:
        events.add_accuracy_gate_events(session, records)
        told = {e.subject.split()[-1]: e.severity for _, e in events_to_address(session)}
    assert told == {"regression": "critical", "ambiguous": "warning", "missing": "critical"}


def test_receiver_outage_neither_loses_nor_repeats_messages(database, receiver, subscribe):
    with database.session() as session:
        for number in range(3):
            add_event(session, an_event(f"event {number}", subject=f"{number}"))
    receiver.answers = [503]
    told = subscribe()

    first = sending(database, told)
    assert first.failures == {"hook": "the receiver answered with status 503"}
    assert (first.sent, first.waiting) == (0, 3)
    at_once = sending(database, told, NOW + timedelta(seconds=1))
    assert at_once.failures == {}  # none is due before the back-off ends
    receiver.answers = [200]
    later = sending(database, told, NOW + timedelta(minutes=2))
    again = sending(database, told, NOW + timedelta(days=1))

    assert (later.sent, later.waiting, again.sent) == (3, 0, 0)
    assert [message["subject"] for message in receiver.messages] == ["0", "1", "2"]


def test_unreachable_receiver_is_reported_without_its_url(
    database, receiver, subscribe, monkeypatch
):
    with database.session() as session:
        add_event(session, an_event())
    receiver.server.server_close()

    sent = sending(database, subscribe())

    (why,) = sent.failures.values()
    with database.session() as session:
        assert session.scalars(select(Delivery.detail)).all() == [why]
    assert "can't be reached" in why
    assert "token" not in why
    assert "127.0.0.1" not in why


def test_slow_receiver_is_cut_off_at_the_deadline(
    database, receiver, subscribe, monkeypatch, caplog
):
    """A timeout of each part of a response is none of the whole."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(channels, "DEADLINE_S", 0.3)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip():
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nX-A: ")
                while not ended.wait(0.05):
                    connection.sendall(b"a")

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        monkeypatch.setenv("DRIP_URL", f"http://127.0.0.1:{listening.getsockname()[1]}/in-the-url")
        drips = '[[subscription]]\nname = "drips"\nurl_env = "DRIP_URL"\n'
        with database.session() as session:
            add_event(session, an_event())

        sent = sending(database, subscribe(drips))

        assert sent.failures == {"drips": "the receiver did not answer within 0.3 s"}
        assert (sent.sent, sent.waiting) == (1, 1)
        ended.set()
        thread.join()
    sender = next((t for t in threading.enumerate() if t.name == "notification"), None)
    if sender is not None:
        sender.join()
    assert "in-the-url" not in caplog.text  # what it logs at last, neither
    assert logging.getLogger("urllib3").level == logging.NOTSET


def test_exception_of_a_library_is_a_failed_delivery(database, receiver, subscribe, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError(arguments[0])

    monkeypatch.setattr("requests.post", broken)
    with database.session() as session:
        add_event(session, an_event())

    assert sending(database, subscribe()).failures == {"hook": "sending failed (RuntimeError)"}


def test_libraries_that_send_log_no_url(database, receiver, subscribe, monkeypatch, caplog):
    """Also where somebody lets every library say everything."""
    monkeypatch.setenv("APPRISE_URL", receiver.url.replace("http", "json", 1))
    more = '[[subscription]]\nname = "more"\nurl_env = "APPRISE_URL"\n'
    with database.session() as session:
        add_event(session, an_event())
    caplog.set_level(logging.DEBUG)

    sent = sending(database, subscribe(more))

    assert (sent.sent, sent.failures) == (2, {})
    assert "in-the-url" not in caplog.text
    assert "/hook" not in caplog.text
    assert logging.getLogger("urllib3").level == logging.NOTSET


def test_outage_of_a_receiver_stops_no_other(database, receiver, subscribe, monkeypatch):
    monkeypatch.setenv("DEAD_URL", "http://127.0.0.1:9/")
    dead = '[[subscription]]\nname = "dead"\nurl_env = "DEAD_URL"\n'
    with database.session() as session:
        add_event(session, an_event("a"))
        add_event(session, an_event("b"))

    sent = sending(database, subscribe(dead))

    assert (sent.sent, sent.waiting, list(sent.failures)) == (2, 2, ["dead"])


def test_message_of_a_dead_sender_is_sent_by_the_next(database, receiver, subscribe):
    with database.session() as session:
        add_event(session, an_event())
        ((event, _),) = events_to_address(session)
        address(session, event, ["hook"], at=NOW)
    with database.session() as session:
        claimed = claim(session, at=NOW, hold=CLAIM_DURATION, subscriptions=["hook"])

    assert sending(database, subscribe(), NOW + timedelta(seconds=1)).sent == 0
    assert sending(database, subscribe(), NOW + CLAIM_DURATION).sent == 1
    assert receiver.messages[0]["delivery"] == claimed.uuid


def test_two_senders_send_each_message_once(database, receiver, subscribe):
    with database.session() as session:
        for number in range(8):
            add_event(session, an_event(f"event {number}", subject=f"{number}"))
    told = subscribe()
    threads = [threading.Thread(target=sending, args=(database, told)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(message["subject"] for message in receiver.messages) == list("01234567")


def test_other_services_use_apprise(database, receiver, subscribe, monkeypatch):
    pytest.importorskip("apprise")
    port = receiver.server.server_port
    monkeypatch.setenv("SERVICE", f"json://user:{SECRET.replace(' ', '-')}@127.0.0.1:{port}/")
    told = subscribe('[[subscription]]\nname = "service"\nurl_env = "SERVICE"\n')
    with database.session() as session:
        add_event(session, an_event(subject="slower", body="by 5 %"))

    sending(database, told)

    (service,) = [message for message in receiver.messages if "title" in message]
    assert (service["title"], service["message"]) == ("slower", "by 5 %")
    assert len(receiver.messages) == 2


def test_retry_interval_doubles_up_to_its_limit():
    waits = [retry_after(attempts).total_seconds() for attempts in range(12)]

    assert waits[:3] == [60, 120, 240]
    assert waits[-1] == MAX_RETRY_DELAY.total_seconds()


def test_events_before_the_subscription_are_not_sent(database, receiver, subscribe):
    with database.session() as session:
        add_event(session, an_event(created_at=NOW - timedelta(days=30)))

    sent = sending(database, subscribe())

    assert (sent.sent, sent.old, receiver.messages) == (0, 1, [])


@pytest.mark.parametrize(
    ("filters", "goes"),
    [
        ("", True),
        ('kernels = ["flexq-*"]', True),
        ('kernels = ["abq-*"]', False),
        ('gpus = ["*H200*"]', True),
        ('gpus = ["NVIDIA RTX*"]', False),
        ('severity = "warning"', True),
        ('severity = "critical"', False),
        ('kinds = ["alert"]', True),
        ('kinds = ["digest", "gate"]', False),
        ('owner = "flexq"', True),  # of the policy `default`, for flexq-w6a6
        ('owner = "kernels"', False),
    ],
)
def test_subscription_filters_events(subscribe, filters, goes):
    told = subscribe(f'[[subscription]]\nname = "mine"\nurl_env = "X"\n{filters}\n')

    assert ("mine" in [one.name for one in told.of(an_event())]) is goes


def test_kernel_filter_passes_a_digest(subscribe):
    text = '[[subscription]]\nname = "mine"\nurl_env = "X"\nkernels = ["abq-*"]\nowner = "a"\n'
    digest = an_event(kind="digest", kernels=())

    assert [one.name for one in subscribe(text).of(digest)] == ["hook", "mine"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            'name = "a"\nurl_env = "slack://secret@host"',
            "is not the name of an environment variable",
        ),
        ('name = "hook"\nurl_env = "X"', "two subscriptions are called 'hook'"),
        ('name = "a"\nurl_env = "X"\nseverity = "loud"', "no severity 'loud'"),
        ('name = "a"\nurl_env = "X"\nkinds = ["alarm"]', "no kind 'alarm'"),
        ('name = "a"\nurl_env = "X"\ngpu = ["x"]', "no key 'gpu' here"),
        ('name = "a"', "url_env is missing"),
    ],
)
def test_a_wrong_subscription_is_one_line_without_its_secret(subscribe, text, says):
    with pytest.raises(WorkloadError, match=says.replace("(", r"\(")) as raised:
        subscribe(f"[[subscription]]\n{text}\n")

    assert "secret@host" not in str(raised.value)


def test_late_night_is_notified_once(database, receiver, subscribe):
    early = check_late_night(database, "nightly", "06:30", now=NOW)
    late = NOW.replace(hour=7)
    states = [check_late_night(database, "nightly", "06:30", now=late) for _ in range(2)]
    sending(database, subscribe(), late)

    assert early is None
    assert states[0] == states[1]
    assert "never begun" in states[0]
    (message,) = receiver.messages
    assert message["subject"] == "Night 2026-01-15 (nightly) was not done by 06:30 UTC"

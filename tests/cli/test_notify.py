"""`notify`: delivery of notifications, without printing credentials."""

from __future__ import annotations

import json

import pytest

from flexq_bench.cli.notify import send_if_subscribed
from flexq_bench.db.engine import open_database

pytest.importorskip("requests")
TOKEN = "xoxb-very-secret"


@pytest.fixture
def subscribed(tmp_path, monkeypatch):
    """Two receivers: nothing listens at the one, the other's variable is not set."""
    path = tmp_path / "subscriptions.toml"
    path.write_text(
        'version = 1\n[[subscription]]\nname = "dead"\nurl_env = "DEAD_URL"\n'
        '[[subscription]]\nname = "unset"\nurl_env = "UNSET_URL"\n'
    )
    monkeypatch.setenv("DEAD_URL", f"http://127.0.0.1:9/{TOKEN}")
    monkeypatch.delenv("UNSET_URL", raising=False)
    monkeypatch.setenv("FLEXQ_BENCH_SUBSCRIPTIONS", str(path))
    return path


@pytest.mark.usefixtures("subscribed")
def test_test_message_names_failed_receivers(cli):
    ran = cli("notify", "--test")

    assert ran.code == 5
    assert "dead: the receiver can't be reached" in ran.out
    assert "unset: UNSET_URL is not set: it must have the URL of unset" in ran.out


@pytest.mark.usefixtures("subscribed")
def test_late_night_has_exit_code_4_and_waits_for_receivers(cli, database):
    ran = cli("notify", "--late", "00:00")
    again = cli("notify", "--late", "00:00", "--json")

    assert (ran.code, again.code) == (4, 4)
    assert "is not done at 00:00 UTC: never begun" in ran.out
    assert json.loads(again.out)["waiting"] == 2
    assert "unset: the variable that its url_env names is not set here" in ran.err


@pytest.mark.usefixtures("subscribed")
def test_credentials_are_neither_printed_nor_stored(cli, database):
    ran = cli("--debug", "-vv", "notify", "--late", "00:00")

    assert TOKEN not in ran.out + ran.err
    with open_database(str(database)) as opened:
        opened.close()
    assert TOKEN.encode() not in database.read_bytes()


@pytest.mark.usefixtures("subscribed")
@pytest.mark.parametrize(
    "url", ["slack://not/enough", f"jsons://user:{TOKEN}@127.0.0.1:9/", f"github://{TOKEN}@x"]
)
def test_messages_of_apprise_with_url_are_not_shown(cli, monkeypatch, caplog, url):
    pytest.importorskip("apprise")
    monkeypatch.setenv("DEAD_URL", url)

    ran = cli("--debug", "-vv", "notify", "--test")

    assert ran.code == 5
    assert TOKEN not in ran.out + ran.err + caplog.text
    assert url not in ran.out + ran.err + caplog.text


@pytest.mark.usefixtures("subscribed")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--late", "25:00"), "write an hour, UTC, as 06:30"),
        (("--subscriptions", "missing.toml"), "can't read missing.toml"),
    ],
)
def test_invalid_notify_options_are_usage_errors(cli, arguments, says):
    ran = cli("notify", *arguments)

    assert ran.code == 2
    assert says in ran.error


def test_missing_subscriptions_are_usage_error(cli, monkeypatch):
    monkeypatch.delenv("FLEXQ_BENCH_SUBSCRIPTIONS", raising=False)

    assert "--subscriptions FILE, or set FLEXQ_BENCH_SUBSCRIPTIONS" in cli("notify").error


@pytest.mark.usefixtures("subscribed")
def test_night_names_receivers_without_url(database, capsys):
    with open_database(str(database)) as opened:
        send_if_subscribed(opened)

    errors = capsys.readouterr().err
    assert "unset: the variable that its url_env names is not set here" in errors

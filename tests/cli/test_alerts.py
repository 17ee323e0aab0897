"""`alerts` and `explain`: alerts, their states and their evidence."""

from __future__ import annotations

import json
import os
import re
import sqlite3

import pytest
from alembic import command
from sqlalchemy import create_engine

from flexq_bench.db import schema
from flexq_bench.db.engine import open_database
from flexq_bench.db.records import DeviceInfo
from flexq_bench.exit_codes import ExitCode
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts import alert_rule
from flexq_bench.verdicts.nightly import record_night


@pytest.fixture
def alert(database, commits, compared) -> str:
    """The id of a stored alert about two kernels."""
    machine = Machine("cpu", DeviceInfo("CPU-1", "A CPU", "cpu"))
    slow = [compared("flexq-w6a6", 1.05), compared("flexq-w6a8", 1.03), compared("cublas-fp16")]
    with open_database(str(database)) as opened, opened.session() as session:
        (alert_id,) = record_night(session, slow, machine, commits, alerting=True).opened
    return str(alert_id)


@pytest.fixture
def empty(database) -> None:
    open_database(str(database)).close()


def listed(cli, *options) -> list[dict]:
    ran = cli("alerts", "list", *options, "--json")
    assert ran.code == ExitCode.PASS, ran.err
    return json.loads(ran.out)


def test_open_alert_is_listed_with_commit_range(cli, alert):
    (row,) = listed(cli)
    assert (row["id"], row["state"], row["family"]) == (int(alert), "new", "flexq")

    shown = cli("alerts", "list").out
    assert "0000000000..0000000000" in shown
    assert re.search(r"\+5\.0\d %", shown)


@pytest.mark.parametrize(
    ("verb", "state", "is_open"),
    [
        ("acknowledge", "acknowledged", True),
        ("explained", "explained", False),
        ("fixed", "fixed", False),
        ("false-alarm", "false-alarm", False),
    ],
)
def test_alert_state_is_set(cli, alert, verb, state, is_open):
    ran = cli("alerts", verb, alert, "--note", "as wanted", "--by", "Ada")

    assert ran.code == ExitCode.PASS
    assert f"alert {alert}: new -> {state}, by Ada" in ran.out
    assert bool(listed(cli)) == is_open
    assert listed(cli, "--state", state)[0]["note"] == "as wanted"
    assert f"{state}, by Ada: as wanted" in cli("explain", alert).out


def test_person_defaults_to_user(cli, alert, monkeypatch):
    monkeypatch.setenv("LOGNAME", "grace")

    assert "by grace" in cli("alerts", "fixed", alert).out
    assert "by grace" in cli("alerts", "acknowledge", alert, "--by", " ").out

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert f"by uid {os.getuid()}" in cli("alerts", "fixed", alert).out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("alerts", "fixed", "99"), "no alert 99"),
        (("explain", "99"), "no alert 99"),
        (("alerts", "acknowledge", "1"), "is acknowledged already"),
        (("alerts", "list", "--state", "acknowledge"), "no state 'acknowledge': there are ack"),
        (("alerts", "explained", "1"), "--note"),
        (("alerts", "explained", "1", "--note", " "), "--note"),
        (("alerts", "false-alarm", "1", "--note", " "), "--note"),
        (("explain", "1", "--png", "/nowhere/why.png"), "there is no folder"),
    ],
)
def test_invalid_requests_are_usage_errors(cli, alert, arguments, says):
    cli("alerts", "acknowledge", alert)

    ran = cli(*arguments)

    assert ran.code == ExitCode.USAGE
    assert says in ran.error


@pytest.mark.usefixtures("empty")
def test_empty_alert_list_says_so(cli):
    assert "no alert is open" in cli("alerts", "list").out
    assert "no alert was ever opened" in cli("alerts", "list", "--state", "all").out
    assert listed(cli) == []


def test_explain_of_distant_commits_names_the_bisection(cli, database, commits, compared):
    machine = Machine("cpu", DeviceInfo("CPU-1", "A CPU", "cpu"))
    slow = [compared("flexq-w6a6", 1.05, base=1, head=5)]
    with open_database(str(database)) as opened, opened.session() as session:
        (alert,) = record_night(session, slow, machine, commits, alerting=True).opened

    assert f"bisect 1 --good {1:040x}"[:26] in cli("explain", str(alert)).out


def test_explain_recomputes_and_draws_verdicts(cli, alert, tmp_path):
    ran = cli("explain", alert, "--png", str(tmp_path / "why.png"))

    assert ran.code == ExitCode.PASS
    assert "2 of 2 verdicts are the same to the last bit" in ran.out
    assert ran.out.count("estimate") == 2
    assert "Change 2 (Ada)" in ran.out
    assert "no commit lies between" in ran.out
    assert (tmp_path / "why.png").stat().st_size > 1000
    assert cli("explain", alert, "--most", "1").out.count("estimate") == 1


def test_explain_json_has_evidence(cli, alert):
    explanation = json.loads(cli("explain", alert, "--json").out)

    first = explanation["decisions"][0]
    assert first["agrees"] is True
    assert len(first["evidence"]["comparison"]["base_us"]) == 12
    assert explanation["events"][0]["state"] == "new"


def change_decisions(database, values):
    with sqlite3.connect(database) as connection:
        connection.execute(f"UPDATE decision SET {values} WHERE alert_id IS NOT NULL")
    connection.close()


@pytest.mark.parametrize(
    "values", ["verdict = 'same'", "reason = 'other'", "input_hash = 'x'", "numbers = '{}'"]
)
def test_changed_verdict_is_infrastructure_error(cli, alert, database, values):
    change_decisions(database, values)

    ran = cli("explain", alert)

    assert ran.code == ExitCode.INFRASTRUCTURE
    assert ran.out.count("don't trust it") == 2


def test_upgraded_database_explains_verdicts_of_earlier_detector(cli, alert, database):
    change_decisions(database, "detector_version = 3, parameters = '{}', reason = 'as then'")
    engine = create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:  # as before rules were stored
        command.downgrade(schema.alembic_config(connection), "0023")
    engine.dispose()
    assert cli("db", "upgrade").code == ExitCode.PASS

    ran = cli("explain", alert)

    assert ran.code == ExitCode.PASS, ran.err
    as_decided, _, again = ran.out.partition("recomputed with the rules of this version")
    assert as_decided.count("interleaved 3") == 2
    assert as_decided.count("as then") == 2
    assert "rule: not stored by the version that decided" in as_decided
    assert f"interleaved {alert_rule.DETECTOR_VERSION} says slower" in again
    decisions = json.loads(cli("explain", alert, "--json").out)["decisions"]
    assert [(row["problem"], row["today"]["verdict"]) for row in decisions] == [("", "slower")] * 2

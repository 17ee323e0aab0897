"""Alerts from verdicts: opening, joining, and closing."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from flexq_bench.db import queries
from flexq_bench.db.decisions import set_alert_state
from flexq_bench.db.records import DeviceInfo
from flexq_bench.runs.machine import Machine
from flexq_bench.verdicts.alert_rule import kernel_family
from flexq_bench.verdicts.nightly import record_night

NOW = datetime(2026, 2, 1, tzinfo=UTC)


def states(session):
    return {alert.id: alert.state for alert in queries.alerts(session)}


def only_alert(session):
    (alert,) = queries.alerts(session)
    return alert


def test_change_of_several_series_opens_a_single_alert(session, record, compared):
    night = record(
        *(compared("flexq-w6a6", 1.05, shape=(m, 256, 256)) for m in (1, 2, 4)),
        compared("flexq-w6a8", 1.05),
        compared("cublas-fp16"),
    )

    alert = only_alert(session)
    assert night.opened == (alert.id,)
    assert (alert.family, alert.state, len(alert.series)) == ("flexq", "new", 4)
    assert alert.worst == pytest.approx(0.0488, abs=0.002)


def test_another_gpu_joins_the_same_alert(session, record, compared):
    record(compared("flexq-w6a6", 1.05))
    record(compared("flexq-w6a6", 1.05), on=Machine("cpu", DeviceInfo("CPU-2", "Other", "cpu")))

    alert = only_alert(session)
    assert alert.gpus == ("A CPU", "Other")
    assert len(alert.series) == 2


def test_alert_of_another_project_has_its_name(session, machine, compared, commits):
    theirs = {sha: replace(commit, project="acme") for sha, commit in commits.items()}
    on = replace(machine, project="acme")

    record_night(session, [compared("flexq-w6a6", 1.05)], on, theirs, alerting=True, at=NOW)

    alert = only_alert(session)
    (series,) = alert.series
    assert alert.bad.project == "acme"
    assert queries.series_identity_of(session, series)["project"] == "acme"


def test_another_family_is_another_alert(session, record, compared):
    record(compared("flexq-w6a6", 1.05), compared("cublas-fp16", 1.05))

    assert sorted(alert.family for alert in queries.alerts(session)) == ["cublas", "flexq"]


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("flexq-w6a8", "flexq"),
        ("flexq-imma-w6a6", "flexq-imma"),
        ("abq-w2*a8", "abq"),
        ("cublaslt-w8a8", "cublaslt"),
        ("cublas-fp16", "cublas"),
        ("read-6", "read"),
        ("empty", "empty"),
    ],
)
def test_a_family_is_a_name_without_its_bits(kernel, family):
    assert kernel_family(kernel) == family


def test_recording_a_night_twice_changes_nothing(session, record, compared):
    first = record(compared("flexq-w6a6", 1.05))
    again = record(compared("flexq-w6a6", 1.05))

    assert (first.opened, again.opened) == ((only_alert(session).id,), ())
    assert only_alert(session).decisions == 1
    assert len(queries.alert_events(session, only_alert(session).id)) == 1


def test_later_night_with_the_same_change_joins(session, record, compared):
    record(compared("flexq-w6a6", 1.05, base=3, head=6), night=1)
    later = record(compared("flexq-w6a6", 1.05, base=3, head=8), night=2)

    alert = only_alert(session)
    assert later.joined == (alert.id,)
    assert alert.decisions == 2
    assert alert.bad.topo_order == 6


@pytest.mark.parametrize(("base", "head", "count"), [(5, 9, 1), (1, 4, 1), (6, 9, 2), (1, 3, 2)])
def test_overlapping_ranges_are_a_single_alert(session, record, compared, base, head, count):
    record(compared("flexq-w6a6", 1.05, base=3, head=6))
    record(compared("flexq-w6a6", 1.05, base=base, head=head), night=2)

    assert len(queries.alerts(session)) == count


def test_alert_has_the_narrowest_range(session, record, compared):
    record(
        compared("flexq-w6a6", 1.05, base=1, head=8),
        compared("flexq-w6a8", 1.05, base=5, head=8),
        compared("flexq-w6a8", 1.05, base=3, head=8, shape=(2, 256, 256)),
    )

    assert only_alert(session).good.topo_order == 5


def test_equal_machine_code_is_an_environment_effect(session, record, compared):
    night = record(compared("flexq-w6a6", 1.05, same_binary=True))

    assert (night.judged[0].confirmation.verdict, night.judged[0].confirmation.cause) == (
        "slower", "environment",
    )  # fmt: skip
    assert queries.alerts(session) == []


def test_change_shared_by_the_anchors_is_the_machine(session, record, compared):
    slow = [compared(kernel, 1.05) for kernel in ("flexq-w6a6", "cublaslt-w8a8", "read-6")]

    night = record(*slow)

    first = night.judged[0]
    assert (first.confirmation.verdict, first.confirmation.cause) == ("slower", "environment")
    assert "floor +5." in first.confirmation.reason
    assert "caused by the machine" in first.confirmation.reason
    # Nothing stands beside the baseline itself, and a floor is not judged.
    assert {alert.family for alert in queries.alerts(session)} == {"cublaslt"}


def test_insignificant_anchors_excuse_no_kernel(session, record, compared):
    anchors = [compared(kernel, 1.008, noise=0.02) for kernel in ("cublaslt-w8a8", "read-6")]

    night = record(compared("flexq-w6a6", 1.013), *anchors)

    found = night.judged[0].confirmation
    assert [judged.confirmation.log_ratio > 0.005 for judged in night.judged] == [True] * 3
    assert (found.verdict, found.cause) == ("slower", "code")
    anchors = "in the same comparison floor unchanged, cublaslt-w8a8 unchanged"
    assert f"{anchors}: caused by the code" in found.reason
    assert only_alert(session).family == "flexq"


def test_remainder_beyond_the_machine_is_the_code(session, record, compared):
    anchors = [compared(kernel, 1.02, noise=0.0001) for kernel in ("cublaslt-w8a8", "read-6")]

    night = record(compared("flexq-w6a6", 1.05, noise=0.0001), *anchors)

    found = night.judged[0].confirmation
    assert found.cause == "code and environment"
    assert re.search(r"floor \+(2\.0|1\.9)\d%", found.reason)
    assert re.search(r"\+2\.9\d% remains for the code", found.reason)


def test_slowdown_with_steady_anchors_is_the_code(session, record, compared):
    night = record(compared("flexq-w6a6", 1.05), compared("cublaslt-w8a8"), compared("read-6"))

    assert night.judged[0].confirmation.cause == "code"
    assert only_alert(session).family == "flexq"


def test_wrong_result_opens_an_alert(session, record, compared):
    record(compared("flexq-w6a6", correct=False, detail="head: 3 values differ"))

    alert = only_alert(session)
    assert alert.worst is None
    (decision,) = queries.alert_decisions(session, alert.id)
    assert (decision.verdict, decision.reason) == ("incorrect", "head: 3 values differ")


def test_pull_request_is_stored_without_an_alert(session, record, compared):
    night = record(compared("flexq-w6a6", 1.05), alerting=False)

    assert (night.opened, queries.alerts(session)) == ((), [])


def test_alert_closes_when_every_series_is_back(session, record, compared):
    both = ("flexq-w6a6", "flexq-w6a8")
    record(*(compared(kernel, 1.05, base=3, head=6) for kernel in both), night=1)
    one = record(compared(both[0], base=3, head=8), night=2)
    other = record(compared(both[1], base=3, head=9), night=3)

    alert = only_alert(session)
    assert (one.fixed, other.fixed) == ((), (alert.id,))
    assert alert.state == "fixed"
    assert alert.closed_at is not None
    assert "back at the level" in queries.alert_events(session, alert.id)[-1].note


def test_slow_series_keeps_the_alert_open(session, record, compared):
    record(compared("flexq-w6a6", 1.05, base=3, head=6), night=1)
    record(
        compared("flexq-w6a6", 1.0, base=3, head=8),
        compared("flexq-w6a8", 1.05, base=3, head=8),
        night=2,
    )

    assert only_alert(session).state in ("new", "acknowledged")


def test_pull_request_does_not_fix_an_alert(session, record, compared):
    both = ("flexq-w6a6", "flexq-w6a8")
    record(*(compared(kernel, 1.05, base=3, head=6) for kernel in both), night=1)
    record(compared(both[0], base=3, head=8), night=2, alerting=False)
    record(compared(both[1], base=3, head=9), night=3)

    assert only_alert(session).state == "new"


@pytest.mark.parametrize(("base", "head"), [(5, 8), (3, 5), (3, 6)])
def test_fix_needs_the_good_level_after_the_bad_commit(session, record, compared, base, head):
    record(compared("flexq-w6a6", 1.05, base=3, head=6), night=1)
    record(compared("flexq-w6a6", 1.0, base=base, head=head), night=2)

    assert only_alert(session).state == "new"


def test_return_after_a_fix_is_a_new_alert(session, record, compared):
    record(compared("flexq-w6a6", 1.05, base=3, head=6), night=1)
    record(compared("flexq-w6a6", 1.0, base=3, head=8), night=2)
    record(compared("flexq-w6a6", 1.05, base=3, head=9), night=3)

    assert sorted(states(session).values()) == ["fixed", "new"]


@pytest.mark.parametrize("state", ["explained", "false-alarm"])
def test_decided_range_opens_no_new_alert(session, record, compared, state):
    (alert,) = record(compared("flexq-w6a6", 1.05, base=3, head=6)).opened
    set_alert_state(session, alert, state, person="Ada", note="known", at=NOW)
    later = record(compared("flexq-w6a8", 1.05, base=3, head=6), night=2)

    assert later.joined == (alert,)
    assert states(session) == {alert: state}


def test_unordered_commits_share_an_alert_by_name_only(session, machine, compared, commits):
    unordered = {key: replace(info, topo_order=None) for key, info in commits.items()}
    for base, head in ((3, 6), (3, 8), (4, 9)):
        record_night(
            session,
            [compared("flexq-w6a6", 1.05, base=base, head=head)],
            machine,
            unordered,
            alerting=True,
        )

    assert len(queries.alerts(session)) == 2


@pytest.mark.parametrize(
    ("kernel", "ratio", "options"),
    [
        ("flexq-w6a6", 1.0, {}),
        ("flexq-w6a6", 0.95, {}),
        ("flexq-w6a6", 1.05, {"base": 2, "head": 2}),
        ("read-6", 1.06, {"noise": 0.0005}),
        ("read-6", 1.06, {"noise": 0.05}),
    ],
    ids=["same", "faster", "commit compared with itself", "floor", "noisy floor"],
)
def test_no_regression_opens_no_alert(session, record, compared, kernel, ratio, options):
    record(compared(kernel, ratio, **options))

    assert queries.alerts(session) == []

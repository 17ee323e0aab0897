"""The Alert page, and what it may write."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sqlite3
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import pytest
from made_results import H200, a_record, a_run, numbers
from page_content import charts, table, words
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.database import current_database, write_alert
from flexq_bench.db import queries
from flexq_bench.db.decisions import set_alert_state
from flexq_bench.db.errors import ReadOnlyError, StaleError
from flexq_bench.db.records import CommitInfo, DeviceInfo
from flexq_bench.results.alert_commands import alert_commands
from flexq_bench.runs.machine import Machine
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

NOW = datetime(2026, 1, 3, tzinfo=UTC)


@pytest.fixture
def alerted(store, compared, commits):
    """A database with one alert: two kernels are 5 % slower in commit 6 than in commit 3."""

    def fill(new):
        slow = [
            compared("flexq-w6a6", 1.05, base=3, head=6, shape=(8, 4096, 4096)),
            compared("flexq-w6a8", 1.03, base=3, head=6),
        ]
        between = compared("cublas-fp16", base=4, head=5)
        new.judge(*slow, between, commits=commits)

    return store.once(fill)


def commands(app: AppTest) -> list[str]:
    return [code.value for code in app.code]


def alert_of(store: Any, alert_id: int = 1) -> Any:
    with store.session() as session:
        return queries.alert_by_id(session, alert_id)


def fill(app: AppTest, *, state: str | None = None, note: str = "", person: str = "Ada") -> AppTest:
    if state is not None:
        next(box for box in app.selectbox if box.label == "State").set_value(state)
    app.text_area[0].set_value(note)
    app.text_input[0].set_value(person)
    return save(app)


def save(app: AppTest) -> AppTest:
    next(button for button in app.button if button.label == "Save").click().run()
    assert not app.exception, app.exception
    return app


def test_missing_alert_is_named_and_no_other_is_shown(alerted, open_alert):
    app = open_alert(alert="99")

    assert "There is no alert 99" in words(app)
    assert not app.dataframe


def test_the_newest_open_alert_is_shown_and_linked(alerted, open_alert, compared, commits):
    alerted.judge(compared("abq-w6a6", 1.1, base=8, head=9), night=2, commits=commits)

    app = open_alert()

    assert app.title[0].value.startswith("Alert 2")
    assert app.query_params["alert"] == "2"
    assert open_alert(alert="1").title[0].value.startswith("Alert 1")


def test_parallel_branch_is_not_in_the_range(alerted, open_alert, compared, commits, sha):
    aside = dataclasses.replace(commits[sha(9)], topo_order=6, subject="Aside")
    night = compared("cublas-fp16", base=4, head=9)
    alerted.judge(night, night=2, commits=commits | {sha(9): aside})

    assert "Aside" not in table(open_alert(), of="subject")["subject"].tolist()


def test_the_commits_of_the_range_have_subject_and_author(alerted, open_alert):
    rows = table(open_alert(), of="subject").to_dict("records")

    assert [(row["range"], row["subject"], row["author"]) for row in rows] == [
        ("last good", "Change 3", "Ada"),
        ("", "Change 4", "Ada"),
        ("", "Change 5", "Ada"),
        ("first seen bad", "Change 6", "Ada"),
    ]
    assert "one of 3 commits" in words(open_alert())


def test_members_are_sorted_slowest_first_with_bounds(alerted, open_alert):
    members = table(open_alert(), of="99 % bounds")

    assert members["kernel"].tolist() == ["flexq-w6a6", "flexq-w6a8"]
    assert members["verdict"].tolist() == ["slower", "slower"]
    assert all(float(change.split()[0]) == pytest.approx(wanted, abs=0.2)
               for change, wanted in zip(members["change"], (5, 3), strict=True))  # fmt: skip
    low, high = (float(part.split()[0]) for part in members["99 % bounds"][0].split(" to "))
    assert low < float(members["change"][0].split()[0]) < high


def test_the_evidence_is_drawn_by_placement(alerted, open_alert):
    evidence = open_alert().get("plotly_chart")[0]

    assert "change of the time" in evidence.proto.spec
    assert "99 % bounds" in evidence.proto.spec


@pytest.fixture
def measured(alerted):
    """The first member's case on two GPUs, commits -8 to 15: 5 % slower from 6 on the H200."""
    case = Case("flexq-w6a6", GemmWorkload(8, 4096, 4096))
    for gpu in (H200, "A CPU"):
        identity = Machine("cpu", DeviceInfo("GPU-1", gpu, "cpu")).series_of(case)
        for order in range(-8, 16):
            median = (10.5 if order >= 6 and gpu == H200 else 10.0) + 0.002 * (order % 3)
            commit = CommitInfo(f"{order % 16**40:040x}", None, max(order, 0), dirty=False)
            run = a_run(f"{gpu} {order}")
            alerted.add(a_record(run, median_us=median, commit=commit, **identity))
    return alerted


def test_series_shows_change_point_and_alert_range(measured, open_alert, sha):
    app = open_alert()

    history = charts(app)[1]
    names = {shape.get("name") for shape in history["layout"]["shapes"]}
    assert {"range of the alert", "change point"} <= names
    (step,) = [s for s in history["layout"]["shapes"] if s.get("name") == "change point"]
    assert step["x0"] == 13.5  # before commit 6, the 15th
    (span,) = [s for s in history["layout"]["shapes"] if s.get("name") == "range of the alert"]
    assert (span["x0"], span["x1"]) == (11, 14)
    assert any(trace.get("fill") == "toself" for trace in history["data"])
    assert re.search(rf"changed at `{sha(6)[:10]}`: \*\*\+(4.9|5.0)\d %", words(app))


def test_each_gpu_is_relative_to_the_last_good_commit(measured, open_alert):
    by_gpu = charts(open_alert())[2]

    lines = {t["name"]: numbers(t["y"]) for t in by_gpu["data"] if t["mode"] == "lines+markers"}
    assert set(lines) == {H200, "A CPU"}
    assert lines[H200][-1] == pytest.approx(105, abs=0.1)
    assert lines["A CPU"][-1] == pytest.approx(100, abs=0.1)
    assert "%" in by_gpu["layout"]["yaxis"]["title"]["text"]


def test_a_verdict_without_a_history_says_so(alerted, open_alert):
    assert "No accepted result of this series is stored" in words(open_alert())


def test_too_short_a_history_says_how_much_is_needed(alerted, open_alert):
    case = Case("flexq-w6a6", GemmWorkload(8, 4096, 4096))
    identity = Machine("cpu", DeviceInfo("GPU-1", H200, "cpu")).series_of(case)
    alerted.add(a_record(**identity))

    assert "8 of one epoch are needed, there are 1" in words(open_alert())


def test_commits_are_linked_by_the_template(alerted, open_alert, monkeypatch, sha):
    assert "look" not in table(open_alert(), of="subject").columns

    monkeypatch.setenv("FLEXQ_BENCH_COMMIT_URL", "https://example.org/c/{sha}?view")

    links = table(open_alert(), of="subject")["look"].tolist()
    assert links[0] == f"https://example.org/c/{sha(3)}?view"


def test_another_verdict_s_evidence_is_in_the_link(alerted, open_alert):
    app = open_alert()
    box = next(box for box in app.selectbox if box.label == "Evidence of")

    app = box.select_index(1).run()

    assert "flexq-w6a8" in commands(app)[1]
    assert "flexq-w6a8" in commands(open_alert(verdict=app.query_params["verdict"]))[1]


def test_clocks_and_machine_code_are_shown(store, open_alert, compared, commits):
    slow = compared("flexq-w6a6", 1.05)
    blocks = len(slow.comparison.base_us)
    clocked = dataclasses.replace(
        slow.comparison,
        base_mhz=(1980.0,) * blocks,
        head_mhz=(1980.0,) * (blocks - 1) + (1500.0,),
    )
    store.judge(dataclasses.replace(slow, comparison=clocked), commits=commits)

    text = words(open_alert())

    assert "base 1980 MHz, head 1500 to 1980 MHz" in text
    assert "the clocks of the two disagree: 1 blocks" in text
    assert "Machine code: **differs**" in text


def test_the_same_machine_code_is_called_out(store, open_alert, compared, commits):
    store.judge(
        compared("flexq-w6a6", correct=False, same_binary=True, detail="3 values differ"),
        commits=commits,
    )

    app = open_alert()

    assert "Machine code: **the same" in words(app)
    assert "wrong results" in app.title[0].value


def test_evidence_that_was_changed_is_not_trusted(alerted, open_alert):
    with closing(sqlite3.connect(alerted.path)) as connection, connection:
        for rowid, data in connection.execute("SELECT decision_id, data FROM decision_evidence"):
            changed = zlib.compress(zlib.decompress(data).replace(b"10.0", b"11.0"))
            connection.execute(
                "UPDATE decision_evidence SET data = ? WHERE decision_id = ?", (changed, rowid)
            )

    assert "Don't trust this verdict: its evidence is not what was judged" in words(open_alert())


def test_the_commands_reproduce_bisect_and_explain(alerted, open_alert, sha):
    explain, compare, bisect = commands(open_alert())

    assert shlex.split(explain)[-4:-2] == ["explain", "1"]
    arguments = shlex.split(compare)
    arguments = arguments[arguments.index("compare") + 1 :]
    assert arguments[:2] == [sha(3)[:10], sha(6)[:10]]
    options = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert options["--kernels"] == "flexq-w6a6"
    assert options["--m"] == "8"
    assert (options["--stage"], options["--cache"]) == ("gemm", "cold")
    assert options["--suite"] in ("nightly", "paper-fig10")
    assert options["--db"] == str(alerted.path)
    assert "--good 0000000000 --bad 0000000000" in bisect


def test_each_commit_is_in_its_place_of_the_command(alerted):
    row = alert_of(alerted)
    with alerted.session() as session:
        member = queries.alert_decisions(session, row.id)[0]
    good = dataclasses.replace(row.good, sha="a" * 40)
    row = dataclasses.replace(row, good=good, bad=dataclasses.replace(row.bad, sha="b" * 40))
    member = dataclasses.replace(member, base="c" * 40, head="d" * 40)

    again = alert_commands(row, member, current_database())

    assert f"compare {'c' * 10} {'d' * 10} " in again.compare
    assert f"bisect {member.series_id} --good {'a' * 10} --bad {'b' * 10}" in again.bisect
    nothing_good = alert_commands(dataclasses.replace(row, good=None), member, current_database())
    assert (nothing_good.compare, nothing_good.bisect) == (None, None)


def test_a_shape_that_no_suite_has_comes_with_a_suite(store, open_alert, compared, commits):
    store.judge(compared("flexq-w6a6", 1.05, shape=(3, 640, 384)), commits=commits)

    suite, compare = commands(open_alert())[1:3]

    assert 'shapes = ["640x384"]' in suite
    assert "--suite alert-1.toml" in compare


def test_a_state_and_a_note_are_stored_with_the_name(alerted, open_alert):
    app = fill(open_alert(), state="acknowledged", note="on it", person=" Ada ")

    row = alert_of(alerted)
    assert (row.state, row.note) == ("acknowledged", "on it")
    with alerted.session() as session:
        assert queries.alert_events(session, 1)[-1].person == "Ada"
    assert "Saved: alert 1 is acknowledged." in words(app)
    assert app.text_area[0].value == ""


def test_a_note_alone_leaves_the_state(alerted, open_alert):
    fill(open_alert(), note="seen on all GPUs")

    assert (alert_of(alerted).state, alert_of(alerted).note) == ("new", "seen on all GPUs")


@pytest.mark.parametrize(
    ("filled_in", "message"),
    [
        ({}, "Nothing to save"),
        ({"state": "explained"}, "Write a note that says why it is explained"),
        ({"state": "fixed", "person": " "}, "Write your name"),
    ],
)
def test_missing_input_is_named_and_nothing_is_stored(alerted, open_alert, filled_in, message):
    app = fill(open_alert(), **filled_in)

    assert message in words(app)
    assert alert_of(alerted).state == "new"


def test_decision_on_a_changed_alert_is_refused(alerted):
    with alerted.session() as session:
        set_alert_state(session, 1, "fixed", person="Bo", note="", at=NOW)

    with pytest.raises(StaleError, match="alert 1 was changed meanwhile and is fixed"):
        write_alert(1, "acknowledged", seen_events=1, person="Ada", note="")
    assert alert_of(alerted).state == "fixed"


def test_second_of_two_simultaneous_decisions_is_refused(alerted):
    both_looked = threading.Barrier(2)

    def decide(state: str) -> str:
        both_looked.wait()
        try:
            write_alert(1, state, seen_events=1, person=state, note="mine")
        except StaleError:
            return "refused"
        return state

    with ThreadPoolExecutor(2) as people:
        ended = set(people.map(decide, ("fixed", "acknowledged")))

    assert len(ended) == 2
    assert ended == {"refused", alert_of(alerted).state}
    with alerted.session() as session:
        assert len(queries.alert_events(session, 1)) == 2


def test_changed_alert_keeps_the_words_of_the_form(alerted, open_alert):
    app = open_alert()
    with alerted.session() as session:
        set_alert_state(session, 1, "acknowledged", person="Bo", note="mine", at=NOW)

    app = fill(app, note="on it")

    assert "alert 1 was changed meanwhile and is acknowledged" in words(app)
    assert (alert_of(alerted).state, alert_of(alerted).note) == ("acknowledged", "mine")
    assert app.text_area[0].value == "on it"
    assert "Bo" in table(app, of="by")["by"].tolist()

    save(app)

    assert alert_of(alerted).note == "on it"


def test_a_read_only_app_has_no_form_and_writes_nothing(alerted, open_alert, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_READ_ONLY", "1")

    app = open_alert()

    assert "read-only" in words(app)
    assert not app.button
    with pytest.raises(ReadOnlyError):
        write_alert(1, "fixed", seen_events=1, person="Ada", note="")
    assert alert_of(alerted).state == "new"


def test_connection_of_pages_can_not_write(alerted):
    with pytest.raises(ReadOnlyError), current_database().session() as session:
        set_alert_state(session, 1, "fixed", person="Ada", note="", at=NOW)
    assert alert_of(alerted).state == "new"


def test_title_names_the_worst_kernel_and_the_count(alerted, open_alert):
    title = open_alert().title[0].value.replace("\\", "")

    assert title.startswith("Alert 1: flexq-w6a6 and 1 more of flexq +")
    assert title.endswith("the worst of 2 verdicts")


def test_a_single_verdict_is_the_worst_of_none(store, compared, commits, open_alert):
    store.judge(compared("flexq-w6a6", 1.05, base=3, head=6), commits=commits)

    title = open_alert().title[0].value.replace("\\", "")

    assert title.startswith("Alert 1: flexq-w6a6 +")
    assert "worst" not in title

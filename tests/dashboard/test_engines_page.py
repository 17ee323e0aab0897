"""The Engines page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_models import a_gate
from made_results import a_run, numbers
from page_content import chart, table_rows, words

from flexq_bench.db.records import GateLimit

BASE = "vllm 0.11"


def an_accuracy(change: float, outcome: str = "pass", suite: str = "gsm8k") -> GateLimit:
    limit = GateLimit(
        f"accuracy of {suite}", "less than 3 points", outcome, "", 70.0, 70.0 + change, change,
        change - 1, change + 1, "points",
    )  # fmt: skip
    return replace(limit, details=("3 questions lost",))


def a_speed(change: float, metric: str = "median_tpot", outcome: str = "pass") -> GateLimit:
    return GateLimit(
        f"speed chat: {metric}", "at most 3 % more", outcome, "", 20.0, 20.0 * (1 + change / 100),
        change, change - 0.5, change + 0.5, "%",
    )  # fmt: skip


def compared(engine: str, *limits: GateLimit, hour: int = 10, **changes: Any) -> Any:
    worst = "fail" if any(limit.outcome == "fail" for limit in limits) else "pass"
    fields: dict[str, Any] = {
        "run": a_run(f"served {engine} {hour}", suite="served"),
        "base": BASE,
        "verdict": worst,
        "exit_code": int(worst == "fail"),
        "limits": limits,
        "created_at": f"2025-11-21T{hour:02}:00:05+00:00",
    }
    return a_gate(engine, **(fields | changes))


def points(app: Any) -> dict[str, Any]:
    return {trace["name"]: trace for trace in chart(app)["data"]}


def test_point_is_an_engine_with_both_intervals_and_its_verdict(store, open_engines):
    store.keep(
        compared("vllm 0.12", an_accuracy(-0.5), a_speed(-4.0)),
        compared("sglang", an_accuracy(-5.0, "fail"), a_speed(2.0)),
    )

    app = open_engines()

    drawn = points(app)
    passed, failed = (
        drawn["vllm 0.12 · SmolLM2-135M · ✓ pass"],
        drawn["sglang · SmolLM2-135M · ✗ fail"],
    )
    assert (numbers(passed["x"]), numbers(passed["y"])) == ([-4.0], [-0.5])
    assert passed["error_x"]["array"] == pytest.approx([0.5])
    assert passed["error_y"]["arrayminus"] == pytest.approx([1.0])
    assert passed["marker"]["symbol"] != failed["marker"]["symbol"]
    rows = {row["engine"]: row for row in table_rows(app, of="engine")}
    assert rows["sglang"]["accuracy"] == 65.0
    assert rows["sglang"]["accuracy of base"] == 70.0
    assert rows["vllm 0.12"]["speed"] == pytest.approx(19.2)


def test_values_are_drawn_with_intervals_around_their_base(store, open_engines):
    store.keep(compared("vllm 0.12", an_accuracy(-0.5), a_speed(-4.0)))

    drawn = points(open_engines(axes="values"))

    engine, base = drawn["vllm 0.12 · SmolLM2-135M · ✓ pass"], drawn[BASE]
    assert (numbers(engine["x"]), numbers(engine["y"])) == ([pytest.approx(19.2)], [69.5])
    assert engine["error_x"]["array"] == pytest.approx([0.1])
    assert engine["error_y"]["array"] == pytest.approx([1.0])
    assert (numbers(base["x"]), numbers(base["y"])) == ([20.0], [70.0])


def test_newest_gate_of_an_engine_counts(store, open_engines):
    store.keep(
        compared("sglang", an_accuracy(-5.0, "fail"), a_speed(2.0), hour=9),
        compared("sglang", an_accuracy(0.0), a_speed(1.0), hour=11),
    )

    (row,) = table_rows(open_engines(), of="engine")

    assert (row["verdict"], row["speed change"]) == ("✓ pass", 1.0)


def test_base_and_metrics_are_selected_by_the_address(store, open_engines):
    store.keep(
        compared("sglang", an_accuracy(-1.0), an_accuracy(-2.0, suite="mmlu"), a_speed(2.0),
                 a_speed(7.0, "tokens_per_s")),
        compared("trtllm", an_accuracy(1.0), a_speed(3.0), base="another"),
    )  # fmt: skip

    app = open_engines(base=BASE, accuracy="accuracy of mmlu", speed="speed chat: tokens_per_s")

    (row,) = table_rows(app, of="engine")
    assert (row["engine"], row["accuracy change"], row["speed change"]) == ("sglang", -2.0, 7.0)
    assert chart(app)["layout"]["xaxis"]["title"]["text"] == "change of tokens_per_s (%)"
    (other,) = table_rows(open_engines(base="another"), of="engine")
    assert other["engine"] == "trtllm"


def test_accuracy_alone_is_in_the_table_and_not_drawn(store, open_engines):
    store.keep(compared("sglang", an_accuracy(-1.0)))

    app = open_engines()

    assert "Nothing to draw" in words(app)
    assert not app.get("plotly_chart")
    (row,) = table_rows(app, of="engine")
    assert row["accuracy change"] == -1.0


def test_limits_of_the_selected_gate_are_shown(store, open_engines):
    old = compared("sglang", an_accuracy(-5.0, "fail"), a_speed(2.0), hour=9)
    store.keep(old, compared("sglang", an_accuracy(0.0), a_speed(1.0), hour=11))

    app = open_engines(gate=old.uuid[:8])

    rows = {row["check"]: row for row in table_rows(app, of="check")}
    assert rows["accuracy of gsm8k"]["outcome"] == "✗ fail"
    assert rows["speed chat: median_tpot"]["sglang"] == pytest.approx(20.4)
    assert "3 questions lost" in words(app)


def test_gates_of_checkpoints_are_not_engines(store, open_engines):
    store.keep(a_gate("flexq-w6ax"))

    assert "No engine was compared yet" in words(open_engines())


def test_hostile_names_are_shown_as_text(store, open_engines):
    name = "<b>x</b> `:red[y]`"
    store.keep(compared(name, an_accuracy(0.0), a_speed(0.0), base=f"{name} $z$"))

    app = open_engines()

    assert not app.exception
    assert all("<b>" not in trace for trace in points(app))

"""The Measurement page: the raw samples of one result."""

from __future__ import annotations

from typing import Any

import pytest
from made_results import a_record, numbers
from page_content import charts, words

SAMPLES = ((8.0, 8.2, 7.9), (8.1, 9.5))


@pytest.fixture
def sampled(store):
    """One result with samples of two placements, one of them at too low a clock."""
    record = a_record(
        samples_us=SAMPLES,
        n_samples=5,
        n_invalid=1,
        placement_medians_us=(8.0, 8.1),
        sm_clock_mhz=1970.0,
        temperature_c=44.0,
        extra={
            "before": {"sm_clock_mhz": 1980.0, "temperature_c": 40.0},
            "after": {"sm_clock_mhz": 1500.0, "temperature_c": 45.0},
            "invalid": {"reason": "SM clock", "samples": [[], [1]]},
        },
        config={"block_n": 64},
    )
    store.add(record)
    return record


def traces(chart: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [trace for trace in chart["data"] if trace["name"] == name]


def test_missing_measurement_is_named(sampled, open_measurement):
    app = open_measurement(uuid="nothing-of-ours")

    assert "no measurement nothing-of-ours" in words(app).replace("`", "")
    assert not app.get("plotly_chart")


def test_the_shares_of_the_samples_rise_to_all_of_them(sampled, open_measurement):
    ecdf, _, _ = charts(open_measurement(uuid=sampled.uuid))

    (every,) = traces(ecdf, "all samples")
    assert numbers(every["x"]) == sorted(value for part in SAMPLES for value in part)
    assert numbers(every["y"]) == pytest.approx([20, 40, 60, 80, 100])
    assert len(traces(ecdf, "each repeat of allocation")) == 2
    assert traces(ecdf, "each repeat of allocation")[0]["y"] is not None


def test_samples_keep_their_order_and_invalid_marks(sampled, open_measurement):
    _, order, _ = charts(open_measurement(uuid=sampled.uuid))

    drawn = [(x, y) for t in traces(order, "sample")
             for x, y in zip(numbers(t["x"]), numbers(t["y"]), strict=True)]  # fmt: skip
    assert drawn == [(1, 8.0), (2, 8.2), (3, 7.9), (4, 8.1)]
    marked = [t for t in traces(order, "at too low a clock, not counted") if numbers(t["x"])]
    assert [(numbers(t["x"]), numbers(t["y"])) for t in marked] == [([5], [9.5])]
    assert [numbers(t["y"])[0] for t in traces(order, "time of the repeat")] == [8.0, 8.1]


def test_clock_is_shown_before_during_and_after(sampled, open_measurement):
    app = open_measurement(uuid=sampled.uuid)

    clock = charts(app)[2]["data"][0]
    assert clock["x"] == ["before", "during", "after"]
    assert numbers(clock["y"]) == [1980.0, 1970.0, 1500.0]
    readings = next(t.value for t in app.dataframe if "temperature (°C)" in t.value.columns)
    assert readings["temperature (°C)"].tolist() == [40.0, 44.0, 45.0]


def test_missing_samples_explain_an_empty_chart(store, open_measurement):
    pruned = a_record(m=1)
    failed = a_record(m=8, status="failed", detail="boom", median_us=None, floor_us=None)
    store.add(pruned, failed)

    assert "pruned" in words(open_measurement(uuid=pruned.uuid))
    assert "never timed" in words(open_measurement(uuid=failed.uuid))
    assert "boom" in words(open_measurement(uuid=failed.uuid))


def test_of_very_many_samples_no_outlier_is_lost(store, open_measurement):
    values = [8.0] * 20_000
    values[12_345] = 99.0
    record = a_record(samples_us=(tuple(values),), n_samples=len(values))
    store.add(record)

    _, order = charts(open_measurement(uuid=record.uuid))

    (drawn,) = traces(order, "sample")
    assert len(numbers(drawn["y"])) <= 4000
    assert 99.0 in numbers(drawn["y"])


def test_names_from_records_are_never_markup(store, open_measurement):
    record = a_record(layer="<b>x</b>", model="[a](http://example.org)", detail="**x**")
    store.add(record)

    raw = "\n".join(str(part.value) for part in open_measurement(uuid=record.uuid).markdown)

    assert "<b>" not in raw
    assert r"\[a\]" in raw
    assert r"\*\*x\*\*" in raw


def test_what_another_tool_states_of_its_result_is_shown(store, open_measurement):
    record = a_record(
        environment={"tool": "nvbench"},
        extra={"remarks": ["the SM clock was 58% of the device's 1785 MHz"], "extra_info": {}},
    )
    store.add(record)

    app = open_measurement(uuid=record.uuid)

    facts = app.dataframe[-1].value.set_index("environment")["value"]
    assert facts["remarks"] == '["the SM clock was 58% of the device\'s 1785 MHz"]'
    assert "extra_info" not in facts

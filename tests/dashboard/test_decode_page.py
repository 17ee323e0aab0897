"""The Decode page."""

from __future__ import annotations

from typing import Any

import pytest
from made_models import GIB, a_decode, a_serving
from made_results import H200, a_run, numbers
from page_content import charts_by_axis, words
from streamlit.testing.v1 import AppTest

from flexq_bench.db.records import DeviceInfo


@pytest.fixture
def decoded(store: Any) -> Any:
    """Two schemes at three batches; flexq-w6ax takes half as long as fp16."""
    return store.keep(
        *(
            a_decode(scheme, batch, factor * (10.0 + batch))
            for scheme, factor in (("fp16", 1.0), ("flexq-w6ax", 0.5))
            for batch in (1, 4, 16)
        ),
    )


def charts(app: AppTest) -> dict[str, dict[str, Any]]:
    """Return the traces by scheme of each chart, by the title of its y axis."""
    return {
        title: {trace["name"]: trace for trace in spec["data"]}
        for title, spec in charts_by_axis(app).items()
    }


def test_latency_is_drawn_by_scheme_and_batch_with_its_interval(decoded, open_decode):
    latency = charts(open_decode())["time of a token (ms, log scale)"]

    assert set(latency) == {"fp16", "flexq-w6ax"}
    trace = latency["flexq-w6ax"]
    assert numbers(trace["x"]) == [1, 4, 16]
    assert numbers(trace["y"]) == pytest.approx([5.5, 7.0, 13.0])
    assert numbers(trace["error_y"]["array"]) == pytest.approx([0.055, 0.07, 0.13])


def test_throughput_has_the_interval_of_the_time_upside_down(decoded, open_decode):
    trace = charts(open_decode())["tokens of the whole batch (1/s, log scale)"]["fp16"]

    assert numbers(trace["y"])[0] == pytest.approx(1000 / 11)
    assert numbers(trace["error_y"]["array"])[0] == pytest.approx(1000 / 11 * (1 / 0.99 - 1))
    assert numbers(trace["error_y"]["arrayminus"])[0] == pytest.approx(1000 / 11 * (1 - 1 / 1.01))


def test_memory_is_drawn_in_gib(decoded, open_decode):
    trace = charts(open_decode())["peak memory (GiB)"]["fp16"]

    assert numbers(trace["y"]) == [7, 10, 22]


def test_unknown_memory_is_named(store, open_decode):
    store.keep(a_decode("fp16", peak_memory_bytes=None))

    app = open_decode()

    assert "peak memory (GiB)" not in charts(app)
    assert "a CPU's memory is not counted" in words(app)


def test_lengths_gpus_and_weights_never_share_a_chart(decoded, open_decode):
    other = DeviceInfo("GPU-2", "NVIDIA A100", "cuda")
    decoded.keep(
        a_decode("fp16", token_ms=99.0, prompt_tokens=1024),
        a_decode("fp16", token_ms=77.0, weights="a folder"),
        a_decode("fp16", token_ms=88.0, device=other, run=a_run("other", suite="decode")),
    )

    def latencies(**link: str) -> list[float]:
        drawn = charts(open_decode(gpu=H200, weights="synthetic") if not link
                       else open_decode(**link))  # fmt: skip
        return numbers(drawn["time of a token (ms, log scale)"]["fp16"]["y"])

    assert latencies() == [99.0]  # the longest
    assert latencies(gpu=H200, weights="synthetic", tokens="15-128") == pytest.approx([11, 14, 26])
    assert latencies(gpu=H200, weights="a folder") == [77.0]
    assert latencies(gpu="NVIDIA A100") == [88.0]


def test_refused_decode_is_listed_with_its_reason(decoded, open_decode):
    decoded.keep(a_decode("fp16", 64, None, status="refused", detail="needs 200 GiB"))

    app = open_decode()

    assert "1 of 7 decodes have no time" in words(app)
    table = app.dataframe[0].value
    assert "needs 200 GiB" in table["why"].tolist()
    assert 64 not in numbers(charts(app)["peak memory (GiB)"]["fp16"]["x"])


def test_the_newest_decode_counts(decoded, open_decode):
    later = a_run("later", suite="decode")
    decoded.keep(a_decode("fp16", 1, 7.0, run=later, created_at="2025-11-22T10:00:05+00:00"))

    latency = charts(open_decode())["time of a token (ms, log scale)"]

    assert numbers(latency["fp16"]["y"])[0] == 7.0


def test_nothing_timed_says_so(store, open_decode):
    store.keep(a_decode("fp16", 64, None, status="failed", detail="boom"))

    app = open_decode()

    assert "Nothing to draw" in words(app)
    assert not app.get("plotly_chart")


def test_link_to_an_undecoded_model_says_so(decoded, open_decode):
    assert "Never decoded, so ignored: model opt-13b" in words(open_decode(model="opt-13b"))


def test_servings_are_drawn_by_scheme_cache_and_batch(store, open_decode):
    store.keep(
        a_serving("fp16", 32, 2000.0),
        a_serving("fp16", 8, 1000.0),
        a_serving("fp16", 41, 2500.0, memory_limit_bytes=24 * GIB),
        a_serving("fp16", 8, 900.0, kv_bits=4),
        a_serving("fp16", 256, None, status="refused", detail="needs 200 GiB"),
    )

    app = open_decode()
    drawn = charts(app)["new tokens (1/s)"]

    assert numbers(drawn["fp16"]["x"]) == [8, 32, 41]
    assert numbers(drawn["fp16"]["y"]) == [1000, 2000, 2500]
    assert [symbol.endswith("-open") for symbol in drawn["fp16"]["marker"]["symbol"]] == [
        False,
        False,
        True,
    ]
    assert numbers(drawn["fp16, 4-bit KV"]["y"]) == [900]
    table = app.dataframe[0].value
    assert "needs 200 GiB" in table["why"].tolist()
    assert table["room, GiB"].dropna().tolist() == [24]


def test_widths_of_the_cache_never_share_a_chart(decoded, open_decode):
    decoded.keep(a_decode("fp16", token_ms=33.0, kv_bits=4, case="llama-7b fp16 kv4"))

    def latencies(**link: str) -> list[float]:
        drawn = charts(open_decode(**link))["time of a token (ms, log scale)"]
        return numbers(drawn["fp16"]["y"])

    assert latencies() == pytest.approx([11, 14, 26])
    assert latencies(kv="4") == [33.0]


def test_model_with_servings_alone_is_shown(store, open_decode):
    unknown = {"steady_memory_bytes": None}
    newer = {**unknown, "created_at": "2025-11-22T10:00:05+00:00"}
    store.keep(
        a_serving("fp16", 64, 500.0, **unknown),
        a_serving("w4a16", 64, 900.0, **unknown),
        a_serving("fp16", 64, 600.0, **newer),
    )

    app = open_decode()

    (table,) = app.dataframe
    assert dict(zip(table.value["scheme"], table.value["tokens/s"], strict=True)) == {
        "fp16": 600.0,
        "w4a16": 900.0,
    }
    assert "memory, GiB" not in table.value.columns  # nobody knows any
    assert "decode llama-7b" in words(app)


def test_servings_and_decodes_are_shown_together(decoded, open_decode):
    decoded.keep(a_serving("fp16", 64, 900.0))

    assert [set(table.value.columns) >= {"scheme"} for table in open_decode().dataframe] == [
        True,
        True,
    ]

"""The Sweep page."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import streamlit as st
from made_results import H200, a_record, a_run, attention
from page_content import charts, words
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.settings import READ_ONLY_VARIABLE
from flexq_bench.db import queries
from flexq_bench.db.fleet import WorkerInfo, register_worker
from flexq_bench.db.records import DeviceInfo
from flexq_bench.db.requests import (
    RequestInfo,
    add_request,
    claim_request,
    finish_request,
    set_request_run,
)
from flexq_bench.fleet.requests import LIMITS

CPU = "A CPU"


def now() -> datetime:
    """Return the current time: a heartbeat at import would be too old when a test runs."""
    return datetime.now(UTC)


@pytest.fixture
def staffed(store):
    """A database with a worker on a CPU."""
    enlist(store)
    return store


def enlist(store: Any, *, silent_for: timedelta = timedelta()) -> None:
    device = DeviceInfo("cpu-1", CPU, "cpu")
    info = WorkerInfo("worker-1", "host", 1, device, {"host": "host"})
    with store.session() as session:
        register_worker(session, info, at=now() - silent_for)


def a_request(store: Any, *, state: str = "queued", m: tuple[int, ...] = (1, 8)) -> RequestInfo:
    """A request for flexq on 4096 x 4096 on an H200; with a run of one result unless queued."""
    content = {
        "kernels": ["flexq-w6a6"],
        "m": list(m),
        "shapes": [{"n": 4096, "k": 4096, "layer": "", "model": ""}],
        "stages": ["gemm"],
        "caches": ["cold"],
    }
    info = RequestInfo("12345678-aaaa", "sweep", content, "Ada", H200, 2, 20.0, now())
    with store.session() as session:
        add_request(session, info, limits=LIMITS)
        if state == "queued":
            return info
        claim_request(session, "server", [H200], until=now() + timedelta(hours=1), at=now())
    store.add(a_record(a_run("swept", suite="sweep"), m=1))
    with store.session() as session:
        set_request_run(session, info.uuid, a_run("swept").uuid)
        if state != "running":
            finish_request(session, info.uuid, state, detail="", at=now())
    return info


def field(app: AppTest, label: str) -> Any:
    widgets = (*app.text_input, *app.multiselect, *app.selectbox, *app.radio)
    return next(widget for widget in widgets if widget.label == label)


def press(app: AppTest, label: str) -> AppTest:
    return next(button for button in app.button if button.label == label).click().run()


def by_sizes(app: AppTest, **texts: str) -> AppTest:
    """The form, filled for a shape of 256 x 256."""
    field(app, "Shapes").set_value("N and K")
    app.run()
    for label, text in (
        {"N (output features)": "256", "K (input features)": "256"} | texts
    ).items():
        field(app, label).set_value(text)
    return app


def requests(store: Any) -> list[Any]:
    with store.session() as session:
        return queries.requests(session)


def test_form_without_workers_says_how_to_start_a_worker(store, open_sweep):
    app = open_sweep()

    assert "No worker is alive" in words(app)
    assert "worker --db" in words(app)
    assert not [button.label for button in app.button]
    assert not [text.label for text in app.text_input if "M (tokens)" in text.label]


def test_a_worker_that_fell_silent_is_not_alive(store, open_sweep):
    enlist(store, silent_for=timedelta(minutes=10))

    assert "No worker is alive" in words(open_sweep())


def test_the_kernels_are_those_of_the_worker_s_backend(staffed, open_sweep):
    options = field(open_sweep(), "Kernels").options

    assert "cublaslt-w8a8" in options
    assert "flexq-imma-w6a6" not in options  # has no CPU implementation
    assert not [label for label in options if label.startswith("read-")]


def test_an_estimate_counts_the_cases_and_queues_nothing(staffed, open_sweep):
    app = by_sizes(open_sweep(), **{"M (tokens)": "1,4:16:x2", "Your name": "Ada"})

    app = press(app, "Estimate")

    # 4 M of two kernels, a read floor for each of their widths, and the empty kernel
    assert "11 cases on A CPU" in words(app)
    assert "no estimate" in words(app)
    assert requests(staffed) == []


def test_an_estimate_comes_from_what_measuring_took(staffed, open_sweep):
    staffed.add(a_record(extra={"wall_s": 3.0}))
    app = by_sizes(open_sweep(), **{"M (tokens)": "1,4", "Your name": "Ada"})

    assert "about 21 s" in words(press(app, "Estimate"))  # 7 cases of 3 s


def test_start_queues_the_typed_sweep(staffed, open_sweep):
    app = by_sizes(open_sweep(), **{"M (tokens)": "1,4", "Your name": "Ada"})

    app = press(app, "Start")

    (request,) = requests(staffed)
    assert (request.state, request.requester, request.gpu) == ("queued", "Ada", CPU)
    assert request.content["m"] == [1, 4]
    assert request.content["shapes"] == [{"n": 256, "k": 256, "layer": "", "model": ""}]
    assert f"Queued as request {request.uuid[:8]}" in words(app)
    assert app.query_params["request"] == request.uuid[:8]
    assert "0 of 7 results" in words(app)


def test_a_model_brings_its_own_shapes(staffed, open_sweep):
    app = open_sweep()
    field(app, "Model").set_value("llama-7b")
    field(app, "Layers").set_value("o_proj")
    field(app, "Your name").set_value("Ada")

    press(app, "Start")

    (request,) = requests(staffed)
    assert request.content["shapes"] == [
        {"n": 4096, "k": 4096, "layer": "o_proj", "model": "llama-7b"}
    ]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"M (tokens)": "1,x"}, "x"),
        ({"M (tokens)": "0"}, "1 to 16,777,216"),
        ({"N (output features)": "99999999999"}, "16,777,216"),
        ({"Your name": "  "}, "a requester has a name"),
        ({"M (tokens)": "1:1000"}, "leave some sizes or kernels out"),
    ],
)
def test_unmeasurable_request_is_refused(staffed, open_sweep, texts, message):
    app = by_sizes(open_sweep(), **{"Your name": "Ada"} | texts)

    app = press(app, "Start")

    assert message in words(app)
    assert requests(staffed) == []


SECRET = "5ec3e7c0ffee" * 5


@pytest.mark.parametrize(
    "label",
    ["M (tokens)", "N (output features)", "K (input features)", "Layers", "Your name"],
)
def test_no_field_of_the_form_opens_a_file(staffed, open_sweep, tmp_path, label):
    file = tmp_path / ".env"
    file.write_text(f"POSTGRES_PASSWORD={SECRET}\n")
    app = open_sweep()
    if label != "Layers":
        app = by_sizes(app, **{"Your name": "Ada"})
    else:
        field(app, "Your name").set_value("Ada")
    field(app, label).set_value(f"@{file}")

    text = words(press(app, "Estimate"))

    assert "PASSWORD" not in text
    assert SECRET[:6] not in text
    assert label == "Your name" or "'@/" in text  # quoted as what was typed; a name may be that
    assert requests(staffed) == []


@pytest.mark.parametrize("exists", [True, False])
def test_form_does_not_reveal_files(staffed, open_sweep, tmp_path, exists):
    file = tmp_path / "sizes.txt"
    if exists:
        file.write_text("1\n2\n")
    app = by_sizes(open_sweep(), **{"M (tokens)": f"@{file}", "Your name": "Ada"})

    assert "is not a size or a range" in words(press(app, "Estimate"))


@pytest.mark.parametrize("button", ["Estimate", "Start"])
def test_shapes_beyond_the_limit_are_counted_and_not_made(staffed, open_sweep, monkeypatch, button):
    texts = {"N (output features)": "1:2000", "K (input features)": "1:2000", "M (tokens)": "1"}
    app = by_sizes(open_sweep(), **texts, **{"Your name": "Ada"})
    monkeypatch.setattr("flexq_bench.sweeps.text.Shape", None)

    app = press(app, button)

    assert "8,000,000 cases, and a sweep may have 2,000: leave some sizes" in words(app)
    assert requests(staffed) == []


@pytest.mark.parametrize(
    ("label", "sent"),
    [("Kernels", ["flexq", "*"]), ("Kernels", ["{0..9999}" * 9]), ("GPU", "NVIDIA H200")],
)
def test_value_outside_the_lists_is_refused(staffed, open_sweep, monkeypatch, label, sent):
    kind = "multiselect" if isinstance(sent, list) else "selectbox"
    real = getattr(st, kind)

    def forged(shown: str, *arguments: Any, **options: Any) -> Any:
        value = real(shown, *arguments, **options)
        return sent if shown == label else value

    app = by_sizes(open_sweep(), **{"Your name": "Ada"})
    monkeypatch.setattr(st, kind, forged)  # a browser may send what it was not offered

    app = press(app, "Start")

    assert f"no {label.lower().removesuffix('s')} " in words(app).lower()
    assert requests(staffed) == []


def test_one_person_can_t_fill_the_fleet(staffed, open_sweep):
    for _ in range(LIMITS.requests):
        press(by_sizes(open_sweep(), **{"Your name": "Ada"}), "Start")

    app = press(by_sizes(open_sweep(), **{"Your name": "Ada"}), "Start")

    assert "Ada has 4 open requests" in words(app)
    assert len(requests(staffed)) == LIMITS.requests


def test_a_read_only_dashboard_has_no_form(staffed, open_sweep, monkeypatch):
    monkeypatch.setenv(READ_ONLY_VARIABLE, "1")

    app = open_sweep()

    assert "read-only" in words(app)
    assert not app.button


def test_running_request_shows_results_so_far(store, open_sweep):
    a_request(store, state="running")

    app = open_sweep()

    assert "running" in words(app)
    assert "1 of 2 results" in words(app)
    (curve,) = charts(app)[0]["data"]
    assert (curve["name"], curve["x"], curve["y"]) == ("flexq-w6a6", [1], [8.0])


def test_curve_is_over_the_varying_size(store, open_sweep):
    a_request(store, state="running")
    store.add(a_record(a_run("swept", suite="sweep"), m=8, median_us=16.0))

    app = open_sweep(show="tops", request="12345678")

    (curve,) = charts(app)[0]["data"]
    assert curve["x"] == [1, 8]
    assert min(curve["error_y"]["array"]) > 0
    assert app.query_params["request"] == "12345678"


def test_results_of_another_operation_are_in_the_table(store, open_sweep):
    content = {
        "kernels": ["sdpa"],
        **{name: [] for name in ("m", "shapes", "stages")},
        "caches": ["cold"],
        "workloads": ["attention_decode:batch=1,context=1024"],
    }
    info = RequestInfo("12345678-aaaa", "sweep", content, "Ada", H200, 2, 20.0, now())
    with store.session() as session:
        add_request(session, info, limits=LIMITS)
        claim_request(session, "server", [H200], until=now() + timedelta(hours=1), at=now())
    store.add(attention(1024, run=a_run("swept", suite="sweep")))
    with store.session() as session:
        set_request_run(session, info.uuid, a_run("swept").uuid)
        finish_request(session, info.uuid, "done", detail="", at=now())

    app = open_sweep()

    assert not app.exception
    assert "Kernels draws other operations" in words(app)
    assert "sdpa" in str([frame.value for frame in app.dataframe])


def test_a_request_that_failed_says_why(store, open_sweep):
    info = a_request(store)
    with store.session() as session:
        finish_request(session, info.uuid, "failed", detail="no such kernel", at=now())

    assert "no such kernel" in words(open_sweep())


def test_link_to_a_missing_request_says_so(store, open_sweep):
    a_request(store)

    assert "ffff" in words(open_sweep(request="ffff"))


def test_requester_is_shown_as_text(store, open_sweep):
    content = {"kernels": ["flexq-w6a6"], "m": [1], "shapes": [], "stages": [], "caches": []}
    info = RequestInfo("1", "sweep", content, "<b>**Ada**</b>", H200, 1, None, now())
    with store.session() as session:
        add_request(session, info, limits=LIMITS)

    shown = "\n".join(str(part.value) for part in open_sweep().markdown)

    assert "<b>" not in shown
    assert r"\<b\>\*\*Ada" in shown
